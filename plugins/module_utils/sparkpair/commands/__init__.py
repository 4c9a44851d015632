"""The subcommands of `sparkpair`. Each module defines `add_to(subparsers)`, which sets `run`."""
