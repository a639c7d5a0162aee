"""Profile transformer models:

python profiling/profile_model.py pair
python profiling/profile_model.py lm --models small,medium --contexts 128,512 --impl naive,cuda
"""

import typer

from attnscope.studies.lm.command import lm_command, pair_command

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command("pair")(pair_command)
app.command("lm")(lm_command)

if __name__ == "__main__":
    app()
