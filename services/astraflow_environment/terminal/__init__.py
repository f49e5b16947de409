"""How is a task in a sandboxed shell played and graded?"""
