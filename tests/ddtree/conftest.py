from hypothesis import settings

# Shared machines make single examples slow; a time limit per example would test the machine.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
