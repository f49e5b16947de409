"""Redis: what is kept where. The only room that sends a command; state changes are the Lua functions in `lua/`."""
