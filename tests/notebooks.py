"""Notebooks run by this very Python, whatever kernels are installed."""

import sys
from pathlib import Path
from typing import Any

import pytest


def said_by(book: Any, folder: Path) -> str:
    """Run all cells in a folder; what they print."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from jupyter_client.kernelspec import KernelSpec

    kernel = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    client = nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager()
    client.km._kernel_spec = kernel
    client.execute()
    outputs = (out for cell in book.cells for out in cell.get("outputs", []))
    return "".join(out["text"] for out in outputs if out.get("name") == "stdout")
