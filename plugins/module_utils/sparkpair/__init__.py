"""sparkpair: what turns two DGX Sparks into one server, as a library.

Imported by the Ansible modules (which ship it to a bare node) and installed as the package
`sparkpair` with the command of the same name. Only the standard library is imported at the top of
a module; `numpy`, `tokenizers` and `huggingface_hub` are imported inside the functions that need them.
"""

from __future__ import annotations

__version__ = "0.1.0"
