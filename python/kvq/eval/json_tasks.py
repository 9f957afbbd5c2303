"""Small sentences, the JSON objects that say the same, and the schemas of these objects."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PEOPLE = (
    "Anna",
    "Peter",
    "Maria",
    "David",
    "Sarah",
    "Thomas",
    "Laura",
    "James",
    "Helen",
    "Daniel",
    "Ruth",
    "Paul",
)
_FAMILIES = ("Keller", "Brown", "Rossi", "Novak", "Martin", "Silva", "Larsen", "Wagner", "Clark", "Moreau")
_CITIES = ("Oslo", "Lima", "Paris", "Cairo", "Delhi", "Rome", "Tokyo", "Boston", "Vienna", "Dublin", "Madrid")
_ITEMS = ("lamp", "table", "chair", "bottle", "basket", "mirror", "carpet", "clock", "ladder", "pencil")
_COLOURS = ("red", "green", "blue", "white", "black", "yellow", "brown")
_WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TEXT = {"type": "string", "minLength": 1}


@dataclass(frozen=True)
class Kind:
    """A kind of object: its schema, and a drawing of (sentence, object)."""

    name: str
    properties: dict[str, Any]
    draw: Callable[[random.Random], tuple[str, dict[str, Any]]]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema: every property is required, and no other is allowed."""
        return {
            "type": "object",
            "properties": self.properties,
            "required": list(self.properties),
            "additionalProperties": False,
        }


def _person(draw: random.Random) -> tuple[str, dict[str, Any]]:
    name, age, city = (
        f"{draw.choice(_PEOPLE)} {draw.choice(_FAMILIES)}",
        draw.randrange(18, 90),
        draw.choice(_CITIES),
    )
    return f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}


def _order(draw: random.Random) -> tuple[str, dict[str, Any]]:
    count, colour, item = draw.randrange(2, 40), draw.choice(_COLOURS), draw.choice(_ITEMS)
    express = draw.random() < 0.5
    wish = "as fast as you can" if express else "whenever you like"
    return (
        f"Please send me {count} {colour} {item}s, {wish}.",
        {"item": item, "colour": colour, "count": count, "express": express},
    )


def _weather(draw: random.Random) -> tuple[str, dict[str, Any]]:
    city, degrees, condition = draw.choice(_CITIES), draw.randrange(-15, 38), draw.choice(_WEATHER)
    return (
        f"It is {condition} in {city} today, at {degrees} degrees.",
        {"city": city, "celsius": degrees, "condition": condition},
    )


def _meeting(draw: random.Random) -> tuple[str, dict[str, Any]]:
    people, day = draw.sample(_PEOPLE, 3), draw.choice(_DAYS)
    time = f"{draw.randrange(8, 19):02}:{draw.choice((0, 15, 30, 45)):02}"
    return (
        f"{people[0]}, {people[1]} and {people[2]} meet on {day} at {time}.",
        {"people": people, "when": {"day": day, "time": time}},
    )


KINDS = (
    Kind("person", {"name": _TEXT, "age": {"type": "integer", "minimum": 0}, "city": _TEXT}, _person),
    Kind(
        "order",
        {
            "item": _TEXT,
            "colour": {"enum": list(_COLOURS)},
            "count": {"type": "integer", "minimum": 1},
            "express": {"type": "boolean"},
        },
        _order,
    ),
    Kind(
        "weather",
        {"city": _TEXT, "celsius": {"type": "integer"}, "condition": {"enum": list(_WEATHER)}},
        _weather,
    ),
    Kind(
        "meeting",
        {
            "people": {"type": "array", "items": _TEXT, "minItems": 3, "maxItems": 3},
            "when": {
                "type": "object",
                "properties": {
                    "day": {"enum": list(_DAYS)},
                    "time": {"type": "string", "pattern": r"^\d\d:\d\d$"},
                },
                "required": ["day", "time"],
                "additionalProperties": False,
            },
        },
        _meeting,
    ),
)


@dataclass(frozen=True)
class TaskSet:
    """Tasks of one kind: worked examples as text, and the sentences to turn into the objects expected."""

    kind: Kind
    examples: str
    sentences: list[str]
    expected: list[dict[str, Any]]


def task_sets(tasks: int, examples: int, seed: int) -> list[TaskSet]:
    """``tasks`` tasks shared out evenly among the kinds; the same for the same arguments."""
    sets = []
    for number, kind in enumerate(KINDS):
        generator = random.Random(f"{seed} {kind.name}")
        drawn = dict(kind.draw(generator) for _ in range(examples))
        shown = "".join(f"{prompt(sentence)} {json.dumps(answer)}\n\n" for sentence, answer in drawn.items())
        asked: dict[str, dict[str, Any]] = {}
        while len(asked) < len(range(number, tasks, len(KINDS))):
            sentence, answer = kind.draw(generator)
            if sentence not in drawn:
                asked[sentence] = answer
        if asked:
            sets.append(TaskSet(kind, shown, list(asked), list(asked.values())))
    return sets


def prompt(sentence: str) -> str:
    """What an object is asked for with."""
    return f"Text: {sentence}\nJSON:"
