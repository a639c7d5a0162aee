"""Read a folder of nsys reports of language models, and write where the time of a step goes:

python profiling/profile_model.py lm --nsys --models small,xl --impl naive --output out
python profiling/analyze_nsys.py out/nsys
"""

import typer

from attnscope.studies.lm.nsys_report import analyze_command

if __name__ == "__main__":
    typer.run(analyze_command)
