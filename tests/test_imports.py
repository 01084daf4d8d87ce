# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`import hf_blend` brings nothing heavy along and changes nothing; import-linter checks what may import what."""

import subprocess
import sys
from pathlib import Path

import pytest

import hf_blend

ROOT = Path(__file__).resolve().parents[1]
LIGHT = {  # a statement, and what it does not import
    "import hf_blend": ("torch", "transformers", "numpy", "huggingface_hub", "typer", "rich"),
    "from hf_blend import BlendConfig, ConfigError; BlendConfig().refuse_depth(4)": ("torch", "transformers", "numpy"),
    "from hf_blend import plugins; [plugins.describe(kind) for kind in plugins.kinds()]": ("torch", "transformers"),
    "from hf_blend.cli.main import build; build(['--help'])": ("torch", "transformers", "numpy", "rich"),
    "import hf_blend.evaluation": ("torch", "transformers", "datasets"),
}
UNCHANGED = """
import logging, os, sys, warnings
def state():
    return sys.path[:], sys.meta_path[:], dict(os.environ), warnings.filters[:], logging.root.handlers[:]
before = state()
import hf_blend
assert before == state()
"""


def test_import_is_light_and_changes_nothing_outside():
    code = UNCHANGED
    for statement, heavy in LIGHT.items():  # one after another, in one process
        code += f"{statement}\n"
        for name in heavy:
            code += f"if {name!r} in sys.modules: print({statement!r}, 'imports', {name!r})\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize("name", hf_blend.__all__)
def test_public_name_is_importable_and_listed(name):
    assert getattr(hf_blend, name) is not None
    assert name in dir(hf_blend)


def test_unknown_name_is_attribute_error():
    with pytest.raises(AttributeError, match="'hf_blend' has no attribute 'BlendCash'"):
        _ = hf_blend.BlendCash
