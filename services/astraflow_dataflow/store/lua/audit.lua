-- Conservation: the counters and, beside them, what the stored groups and batches really hold. One atomic snapshot.

local function held_in_tasks(P)
  local n = 0
  for _, index in ipairs({ K.open(P), K.settling(P) }) do
    for _, task in ipairs(call('ZRANGE', index, 0, -1)) do n = n + call('HLEN', K.members(P, task)) end
  end
  return n
end

local function held_in_ready(P, policy)
  local n = 0
  for _, gid in ipairs(call('ZRANGE', K.ready(P, policy), 0, -1)) do
    for _ in string.gmatch(call('HGET', K.group(P, gid), 'ids') or '', '[^\n]+') do n = n + 1 end
  end
  return n
end

local function held_in_batches(P, policy)
  local n = 0
  for _, id in ipairs(call('HVALS', K.steps(P, policy))) do
    local f = call('HMGET', K.batch(P, id), 'stage', 'groups')
    if f[1] == '' or f[1] == 'intent' then
      for _, gid in ipairs(split(f[2])) do n = n + #split(call('HGET', K.group(P, gid), 'ids')) end
    end
  end
  return n
end

local function last_entry(stream)
  local newest = call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  return newest[1] and newest[1][1] or ''
end

local function policy_state(P, policy)
  local unpublished = 0
  for _, n in ipairs(call('HVALS', K.unpublished(P, policy))) do unpublished = unpublished + tonumber(n) end
  return { policy, call('SCARD', K.outstanding(P, policy)), call('ZCARD', K.ready(P, policy)), unpublished,
    free_credit(P, policy, 0), call('HGETALL', K.policy(P, policy)), call('HGETALL', K.staleness(P, policy)),
    call('LRANGE', K.recent(P, policy), 0, -1), call('HGETALL', K.unpublished(P, policy)), call('HLEN', K.steps(P, policy)), last_entry(K.consumed(P, policy)) }
end

-- audit. Returns { now, run state, counters, { assembling, ready, in_batch } as stored, dead letters, queued tasks, exhausted, retries, policy states }.
local function audit(keys)
  local P = keys[1]
  local ready, in_batch, states = 0, 0, {}
  for _, policy in ipairs(policies(P)) do
    ready = ready + held_in_ready(P, policy)
    in_batch = in_batch + held_in_batches(P, policy)
    states[#states + 1] = policy_state(P, policy)
  end
  local f = call('HMGET', K.run(P), 'state', 'exhausted')
  local lane = K.lane(P, TRAIN)
  local queued = call('XLEN', lane) - call('XPENDING', lane, GROUP)[1]
  return { now_ms(), f[1] or '', call('HGETALL', K.counters(P)), { held_in_tasks(P), ready, in_batch }, call('XLEN', K.dead(P)), queued, f[2] or '0',
    call('ZCARD', K.retry(P, TRAIN)), states }
end

-- supply. Returns { cursor, exhausted, queued, largest credit } for the curator.
local function supply(keys)
  local P, most = keys[1], 0
  local f = call('HMGET', K.run(P), 'cursor', 'exhausted', 'state')
  local lane = K.lane(P, TRAIN)
  for _, policy in ipairs(policies(P)) do
    most = math.max(most, free_credit(P, policy, 0))
    if not call('HGET', K.policy(P, policy), 'version') then most = 0; break end
  end
  return { tonumber(f[1]), f[2], f[3], call('XLEN', lane) - call('XPENDING', lane, GROUP)[1], most }
end
