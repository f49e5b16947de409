"""How does an agent that is written against the OpenAI API reach the policies of its episode?"""
