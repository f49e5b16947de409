"""What do people see in a browser? The page, and the reading rpcs over HTTP that it is made of."""
