"""What the gate reads back from its files: checked against the dataclasses that it was written from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Code = Annotated[int, Field(strict=True, ge=0, le=3)]
Flag = Annotated[bool, Field(strict=True)]


def read(kind: type, values: object):
    """Return a dataclass made of stored values. Raises ValueError in one line: where, what is wrong."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")) from None
