"""`dtrain env cluster=NAME`: the environment of a cluster's network profile, as exports with reasons."""

from __future__ import annotations

import os

from dtrain.config.redaction import hide
from dtrain.preflight.network_env import exports, quote

USAGE = """usage: dtrain env cluster=NAME [setting=value ...]

Print the environment variables of a cluster's network profile as shell exports, each with its reason. A variable that
is set already keeps your value.

  eval "$(dtrain env cluster=gcp-ethernet)"    set them in this shell

Exit codes: 0 done, 2 bad configuration."""


def main(argv: list[str]) -> int:
    """`dtrain env …`: print the exports, for `eval "$(dtrain env cluster=NAME)"`."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    from dtrain.launch.compose import compose

    config = compose(argv)
    for export in exports(config, os.environ):
        print(f"# {export.why}")
        if export.theirs is None:
            print(f"export {export.name}={quote(export.value)}")
        else:
            # the user's value may contain a line break, which would end the comment
            print(
                f"# not exported: your environment has {hide(export.theirs)!r} instead of {export.value!r}, "
                "and takes precedence"
            )
    return 0
