"""A process that renders one chat template and ends: where a client's own template can do no harm.

`python -m kvctl.engine.template_child` reads a JSON object from stdin (`template`, and the arguments of
`ChatTemplate.render`) and writes {"text": ...} or {"refused": ...} to stdout. The system ends it when it takes more
processor time or memory than any conversation needs. Floor 2, imports no torch and no tokenizer.
"""

import json
import resource
import sys
from typing import Final

from kvctl.engine.chat_template import ChatTemplate
from kvctl.errors import InvalidRequest
from kvctl.units import MIB

LIMIT_CPU_S: Final = 4  # under the template's own limit, so that this one is the one that holds
LIMIT_BYTES: Final = 512 * MIB  # of address space; Python and Jinja take a tenth


def main() -> None:
    """Render what stdin asks for."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    try:
        answer = {"text": ChatTemplate({"default": asked.pop("template")}).render(**asked)}
    except InvalidRequest as error:
        answer = {"refused": error.message[:2000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
