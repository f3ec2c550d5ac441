from hypothesis import settings

# The same examples in every run, and no deadline: a first call into torch takes longer than hypothesis allows.
settings.register_profile("ddtree_check", deadline=None, derandomize=True)
settings.load_profile("ddtree_check")
