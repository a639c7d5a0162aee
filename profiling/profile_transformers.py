"""Profile a Llama model of Hugging Face transformers by attention implementation:

python profiling/profile_transformers.py --output transformers_report
"""

import typer

from attnscope.studies.llama.command import transformers_command

if __name__ == "__main__":
    typer.run(transformers_command)
