"""Finding copies of a replaced object, each in its own place and form."""

import sys

import pytest

from overlay.aliases import Replacement, copies, modules_of


def after_import(bench, files: dict[str, str], *names: str):
    """Import the modules of some files, in this order."""
    bench.write(files)
    for name in names:
        __import__(name)
    return [sys.modules[name] for name in names]


def test_every_place_of_a_copy_is_found_once_and_set_in_its_form(bench):
    core, user = after_import(
        bench,
        {
            "acme/core.py": "def f(): return 'old'\nclass Owner:\n    def m(self): return 'old'\n",
            "acme/user.py": """
                from acme import core
                from acme.core import f as g, Owner
                TABLE = {"f": g, "other": len}
                KEPT = [len, g]
                AGAIN = TABLE
                class Holder:
                    call = g
                    static = staticmethod(g)
                    bound = classmethod(g)
                class Child(Owner):
                    renamed = Owner.m
                class Deep(dict): pass
                LAZY = Deep(f=g)
                TUPLE = (g,)
            """,
        },
        "acme.core",
        "acme.user",
    )

    def new():
        return "new"

    def method(self):
        return "new"

    old, old_method = core.f, core.Owner.m
    replacements = [Replacement(old, new), Replacement(old_method, method, owner=core.Owner)]
    found = copies(replacements, [core, user], ["acme"])
    assert sorted(copy.site for copy in found) == [
        "acme.core:f",
        "acme.user:Child.renamed",
        "acme.user:Holder.bound",
        "acme.user:Holder.call",
        "acme.user:Holder.static",
        "acme.user:KEPT[1]",
        "acme.user:LAZY['f']",
        "acme.user:TABLE['f']",
        "acme.user:g",
    ]
    for copy in found:
        copy.rebind()
    assert user.g is new and user.TABLE == {"f": new, "other": len} and user.KEPT == [len, new]
    assert user.LAZY["f"] is new and user.Holder.call is new
    assert user.Holder.static() == "new" and user.Child().renamed() == "new"
    held = vars(user.Holder)
    assert isinstance(held["static"], staticmethod) and isinstance(held["bound"], classmethod)
    assert held["bound"].__func__ is new and core.Owner().m() == "old", "the target itself is no copy"
    assert user.TUPLE == (old,), "what cannot be changed is left"
    assert copies(replacements, [user], ["acme"]) == [] == copies([], [core, user], ["acme"])


def test_a_class_of_another_package_and_a_constant_that_is_only_equal_are_left_alone(bench):
    core, user = after_import(
        bench,
        {
            "acme/core.py": "LIMIT = 70000\ndef f(): pass\n",
            "acme/sub/__init__.py": "",
            "acme/sub/user.py": """
                from ..core import LIMIT as MOST, f
                from acme.core import LIMIT
                from acme import core
                SAME = LIMIT
                TABLE = {"limit": LIMIT}
                from other.base import Foreign
                Foreign.call = f
            """,
            "other/base.py": "class Foreign: pass\n",
        },
        "acme.core",
        "acme.sub.user",
    )
    limit = Replacement(core.LIMIT, 5, constant=("acme.core", "LIMIT"))
    found = copies([limit, Replacement(core.f, len)], [user], ["acme"])
    assert sorted(copy.site for copy in found) == ["acme.sub.user:LIMIT", "acme.sub.user:MOST", "acme.sub.user:f"]
    elsewhere = copies([Replacement(core.f, len)], [user], ["acme", "other"])
    assert [copy.site for copy in elsewhere] == ["acme.sub.user:f", "other.base:Foreign.call"]


def test_modules_are_those_of_the_packages_from_one_on(bench):
    after_import(
        bench,
        {"acme/one.py": "", "acme/two.py": "", "acme/three.py": "", "other/one.py": ""},
        "acme.one",
        "other.one",
        "acme.two",
        "acme.three",
    )
    assert [module.__name__ for module in modules_of(["acme"], after="acme.two")] == ["acme.two", "acme.three"]
    names = [module.__name__ for module in modules_of(["acme.one", "other"])]
    assert names == ["acme", "acme.one", "other", "other.one", "acme.two", "acme.three"]
    with pytest.raises(ValueError, match="absent"):
        modules_of(["acme"], after="absent")
