"""Lists the packages; everything else is in pyproject.toml.

Two import names live in folders of other names (`sglang_rfork` in `python/sglang`, which mirrors SGLang's own tree,
down to folders without an `__init__.py`), and setuptools' declarative `packages.find` does not apply `package-dir` to
what it finds. A test compares wheel and tree.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = {"rfork": "python/rfork", "sglang_rfork": "python/sglang"}

setup(
    packages=[
        name
        for root, folder in FOLDERS.items()
        for name in (root, *(f"{root}.{child}" for child in find_namespace_packages(folder, exclude=["*__pycache__*"])))
    ]
)
