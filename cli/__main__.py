"""`python -m cli`: the same program without an installed entry point. Never anything else."""

from cli.main import app

if __name__ == "__main__":
    app(prog_name="fluidpd")
