"""ddtree-check: is my tree verify right on a hybrid recurrent model, and if not, where, how badly and why?"""

__version__ = "0.1.0"
