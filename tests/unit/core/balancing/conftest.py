from hypothesis import settings

# A deadline per example would fail on a busy machine and say nothing about a policy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
