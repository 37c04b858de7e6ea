"""The Reference pages of the documentation, made from the code each time the site is built.

Each module has one function that returns one page as Markdown; `python -m generators` writes them all. What a page says
comes from the code: correct a wrong sentence there, in the docstring or the help text.
"""
