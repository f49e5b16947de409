"""How does an episode reach the environment that it acts in, here or served elsewhere?"""
