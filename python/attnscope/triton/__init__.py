"""Triton kernels under the schemas of attnscope's ops; importing a module registers its op."""
