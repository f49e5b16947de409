-- What the steps of a policy looked like: figures of each, capped. Nothing but people reads them.

do
  local MAX_STEPS = 100000
  -- Steps with other names than these many sets before, or than so much text, are kept without figures: whoever looks at a run reads all names.
  local MAX_NAME_SETS, MAX_NAME_BYTES = 256, 1048576

  -- Counters that go with each step, beside those of what was dropped.
  local COUNTED = { ingested = true, trained = true, tool_calls = true, tool_errors = true }

  -- Number of a set of names (lines): steps share it, so that names are kept once.
  local function number_of_names(P, policy, names)
    local N = K.series_names(P, policy)
    local known = call('HGET', N, names)
    if known then return known end
    local number = call('HLEN', N)
    if number >= MAX_NAME_SETS or #table.concat(call('HKEYS', N)) + #names > MAX_NAME_BYTES then return '' end
    call('HSET', N, names, number)
    return number
  end

  -- A step ended with these figures (binary32, as many as there are names), and with what is counted now. A step is noted once.
  function history.step(P, policy, step, names, values)
    local S = K.series(P, policy)
    local newest = call('XREVRANGE', S, '+', '-', 'COUNT', 1)[1]
    if newest and tonumber(string.match(newest[1], '^%d+')) >= tonumber(step) then return end
    local counts = { 'ready ' .. call('ZCARD', K.ready(P, policy)), 'outstanding ' .. call('SCARD', K.outstanding(P, policy)),
      'leases ' .. call('ZCARD', K.leases(P)) }
    local counters = call('HGETALL', K.counters(P))
    for i = 1, #counters, 2 do
      local name = counters[i]
      if string.sub(name, 1, 8) == 'dropped:' or COUNTED[name] then
        counts[#counts + 1] = string.gsub(name, ':', '.') .. ' ' .. counters[i + 1]
      end
    end
    call('XADD', S, 'MAXLEN', '~', MAX_STEPS, step .. '-1', 'ms', now_ms(), 'names', number_of_names(P, policy, names), 'values', values,
      'counts', table.concat(counts, '\n'))
  end
end
