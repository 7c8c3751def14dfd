"""``python -m layerzero``: the command line."""

from layerzero.cli.app import main

if __name__ == "__main__":
    main(prog_name="layerzero")
