"""A framework that is installed and cannot be imported: for test_adapters.py."""

import no_such_package_of_a_framework  # type: ignore[import-not-found] # noqa: F401
