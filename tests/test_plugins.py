# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A method is one file: it is described without being imported, loaded alone, and its name may be misspelt."""

import importlib
import os
import sys
from pathlib import Path

import pytest

import hf_blend
from hf_blend import ConfigError, PluginNotFoundError, plugins

BASE = (
    '"""What a fruit is."""\n\n\nclass Fruit:\n    """Base."""\n\n\nclass Basket:\n    """Not a base for files."""\n'
)
PLUGIN = '"""{line}\n\nMore."""\n\nfrom .base import Fruit\n\n\nclass {name}(Fruit):\n    """Doc."""\n'


@pytest.fixture
def fruits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kind of plugin named `fruits`, found where hf_blend itself is found."""
    folder = tmp_path / "fruits"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "base.py").write_text(BASE)
    (folder / "red_apple.py").write_text(PLUGIN.format(line="Crunches.", name="RedApple"))
    (folder / "pear.py").write_text(PLUGIN.format(line="Melts.", name="Pear"))
    (folder / "knife.py").write_text('"""A helper, no plugin."""\n\n\nclass Knife:\n    """Doc."""\n')
    (folder / "_seed.py").write_text("raise RuntimeError('private files are not looked at')\n")
    monkeypatch.setattr(hf_blend, "__path__", [str(tmp_path), *hf_blend.__path__])
    plugins._files.cache_clear()
    importlib.invalidate_caches()
    yield folder
    plugins._files.cache_clear()
    for name in [name for name in sys.modules if name.startswith("hf_blend.fruits")]:
        del sys.modules[name]
    vars(hf_blend).pop("fruits", None)


def test_plugins_are_described_without_being_imported(fruits):
    assert plugins.describe("fruits") == {"pear": "Melts.", "red-apple": "Crunches."}
    assert not [name for name in sys.modules if name.startswith("hf_blend.fruits")]


@pytest.mark.parametrize("name", ["red-apple", "red_apple"])
def test_loading_plugin_imports_it_alone_and_dashes_do_not_matter(fruits, name):
    assert plugins.load("fruits", name).__name__ == "RedApple"
    assert "hf_blend.fruits.pear" not in sys.modules


def test_wrong_name_is_answered_with_near_one_and_list(fruits):
    with pytest.raises(PluginNotFoundError) as caught:
        plugins.load("fruits", "red_aple")
    assert str(caught.value) == (
        "hf_blend.fruits has no plugin named 'red_aple'. Did you mean 'red-apple'? Available: pear, red-apple."
    )


@pytest.mark.parametrize("call", [plugins.describe, lambda kind: plugins.load(kind, "pear")])
def test_wrong_kind_is_answered_with_near_one(fruits, call):
    with pytest.raises(PluginNotFoundError, match=r"no kind of plugin named 'fruit'\. Did you mean 'fruits'\?"):
        call("fruit")


def test_file_with_two_plugins_is_refused_and_private_classes_and_imported_ones_do_not_count(fruits):
    one = PLUGIN.format(line="One.", name="One")
    others = "\n\nclass _Three(Fruit): ...\n\n\nSame = Fruit\n"
    (fruits / "helped.py").write_text(one + others)
    (fruits / "both.py").write_text(f'{one}\n\nclass Two(Fruit):\n    """Doc."""\n{others}')
    assert plugins.load("fruits", "helped").__name__ == "One"
    with pytest.raises(ConfigError, match=r"2 public plugins \(\['One', 'Two'\]\).*own file"):
        plugins.load("fruits", "both")


def test_extension_of_absent_room_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_blend.offload", None)
    monkeypatch.delitem(sys.modules, "hf_blend.offload.layer", raising=False)
    with pytest.raises(ConfigError, match=r"this needs hf_blend\.offload\.layer, which is not installed here\."):
        plugins.extension("offload.layer")


OURS = [(kind, name) for kind in plugins.kinds() for name in plugins.describe(kind)]


def test_every_plugin_of_ours_loads_and_has_first_line():
    for kind, name in OURS:
        assert isinstance(plugins.load(kind, name), type), (kind, name)
    lines = {(kind, name): plugins.describe(kind)[name] for kind, name in OURS}
    unfinished = {names: line for names, line in lines.items() if not line.endswith(".")}
    assert unfinished == {}, "the first docstring line is shown to users"


OWN = """from hf_blend.selectors.base import Selector


class Mine(Selector):
    def score(self, view):
        return view.offset.float()
"""


def test_selector_may_be_file_anywhere_and_edit_of_it_counts(tmp_path):
    path = tmp_path / "my_own.py"
    path.write_text(OWN)
    first = plugins.load("selectors", str(path))
    assert first.__name__ == "Mine"
    assert plugins.load("selectors", str(path)) is first
    path.write_text(OWN.replace("Mine", "Edited"))
    os.utime(path, ns=(1, 1))
    assert plugins.load("selectors", str(path)).__name__ == "Edited"


@pytest.mark.parametrize("kind", ["store.codecs", "store.tiers"])
def test_what_entry_of_store_may_name_is_never_file(kind, tmp_path):
    (tmp_path / "my_own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(hf_blend.PluginNotFoundError):
        plugins.load(kind, str(tmp_path / "my_own.py"))
