# `python -m heed`: the program that was installed with this package, whatever the search path finds first.
"""The program `heed`."""

import os
import subprocess
import sys
import sysconfig


def main() -> int:
    name = "heed.exe" if os.name == "nt" else "heed"
    schemes = [None, *(x for x in sysconfig.get_scheme_names() if x == f"{os.name}_user")]
    programs = [os.path.join(sysconfig.get_path("scripts", *filter(None, [scheme])), name) for scheme in schemes]
    for program in filter(os.path.isfile, programs):
        if os.name != "nt":
            os.execv(program, [program, *sys.argv[1:]])
        return subprocess.call([program, *sys.argv[1:]])
    print(f"heed: found no {' and no '.join(programs)}, where pip puts the program", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
