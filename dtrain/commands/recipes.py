"""`dtrain recipes`: complete starting points."""

from __future__ import annotations

import difflib
import shlex
import shutil
from pathlib import Path

from dtrain.commands.run_parser import RunParser
from dtrain.config.files import RECIPES, read_yaml
from dtrain.util.format import as_dict


def main(argv: list[str]) -> int:
    from dtrain.launch.recipes import built_in

    parser = RunParser("dtrain recipes", description="Complete configurations to start from: recipe=NAME runs one.")
    parser.add_argument("action", choices=["ls", "show", "cp"], nargs="?", default="ls")
    parser.add_argument("name", nargs="?")
    parser.add_argument("target", nargs="?", help="cp: the new file")
    options = parser.parse_args(argv)
    found = built_in()
    if options.action == "ls":
        width = max(map(len, found), default=0)
        for name, path in found.items():
            print(f"{name:{width}}  {path.read_text().splitlines()[0].lstrip('# ')}")
        return 0
    if options.name not in found:
        name = options.name or ""
        near = difflib.get_close_matches(name, found, 1, 0.6) or [one for one in found if name and name in one][:1]
        fix = f"dtrain recipes {options.action} {near[0]}" if near else f"there are {', '.join(found)}"
        raise ValueError(f"recipe={name}: there is no such recipe\n  fix: {fix}")
    if options.action == "show":
        print(found[options.name].read_text(), end="")
        return 0
    copied, launch = found[options.name], ""
    if script := as_dict(
        read_yaml(copied).get("script")
    ):  # a file may not name a program: the program itself is copied
        program = RECIPES / script["path"]
        arguments = shlex.quote(f"script_args=[{','.join(script['args'])}]")
        launch, copied = f"script={{}} {arguments} script.env={script['env']}", program
    target = Path(options.target or copied.name)
    if target.is_dir():
        target = target / copied.name
    if target.exists():
        raise ValueError(f"{target}: already exists\n  fix: choose another name; nothing was written")
    shutil.copyfile(copied, target)
    relative = target if target.is_absolute() else f"./{target}"
    from dtrain.ui.console import LAUNCH

    print(f"wrote {target}; edit it, then: {LAUNCH} {(launch or 'recipe={}').format(relative)}")
    return 0
