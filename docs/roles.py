"""griffe's extension: docstrings write :class:`meshpar.Plan` for editors, and the site shows `meshpar.Plan`."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Roles(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the roles of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
