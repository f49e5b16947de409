"""How does a process that is not trusted run: within which walls, and on which budget?"""
