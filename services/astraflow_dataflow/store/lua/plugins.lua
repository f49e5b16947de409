-- States of plug-ins: a hash per plug-in, and one of revisions. A save names the revision it was made from, so of two servers that
-- changed one state the second reads it again.

-- save_states: then per plug-in: name, revision it was read at, number of entries, and per entry key and value ('' deletes it).
-- Returns 1, or 0 and changes nothing when a revision is another by now.
local function save_states(keys, a)
  local P, i = keys[1], 1
  while i <= #a do
    if (call('HGET', K.plugin_revisions(P), a[i]) or '0') ~= a[i + 1] then return 0 end
    i = i + 3 + 2 * tonumber(a[i + 2])
  end
  i = 1
  while i <= #a do
    local state, after = K.plugin_state(P, a[i]), i + 3 + 2 * tonumber(a[i + 2])
    call('HINCRBY', K.plugin_revisions(P), a[i], 1)
    for at = i + 3, after - 1, 2 do
      if a[at + 1] == '' then call('HDEL', state, a[at]) else call('HSET', state, a[at], a[at + 1]) end
    end
    i = after
  end
  return 1
end
