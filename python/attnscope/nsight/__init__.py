"""Nsight Systems and Nsight Compute, driven by one command each."""
