# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What clients ask of the real model."""

QUESTION = "Who is the master of the harbour?"
SCHEMA = {
    "title": "person",
    "description": "A person.",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "description": "Note a person.", "parameters": SCHEMA}}
