"""Kernels of the Hugging Face hub: found on this disk, checked before they are imported, adapted.

Nothing is downloaded. ``find`` looks for repositories and pins them, ``checks`` says what is wrong with each. ``build``
imports one, and ``effects`` compares a process before and after that.
:mod:`layerzero.engine.hub` registers what is left. An adapter is a function in ``adapters`` and a line of its
``ADAPTERS`` for each repository.
"""
