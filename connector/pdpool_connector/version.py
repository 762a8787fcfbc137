"""The version of pdpool. The wheel takes its version from here, and images that hold only the code know it too."""

from typing import Final

VERSION: Final = "0.1.0"
