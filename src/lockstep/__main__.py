"""`python -m lockstep`: the same as the `lockstep` command."""

from lockstep.cli.main import main

if __name__ == "__main__":
    main()
