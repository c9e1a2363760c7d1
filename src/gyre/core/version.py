"""Version: the package's own, as pyproject.toml has it. Rooms read it here, since the package's
root names the classes that users import."""

VERSION = "0.1.0"
