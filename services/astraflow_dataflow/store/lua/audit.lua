-- Conservation: the counters and, beside them, what the stored groups and batches really hold. One atomic snapshot.

-- Trajectories of tasks that are not settled, and the groups that each policy was charged for them.
local function held_in_tasks(P)
  local n, charged, policy_of = 0, {}, {}
  for _, role in ipairs(trained_roles(P)) do policy_of[role.name] = role.policy end
  for _, index in ipairs({ K.open(P), K.settling(P) }) do
    for _, task in ipairs(call('ZRANGE', index, 0, -1)) do
      n = n + call('HLEN', K.members(P, task))
      for _, role in ipairs(split(call('HGET', K.task(P, task), 'credited'))) do
        charged[policy_of[role]] = (charged[policy_of[role]] or 0) + 1
      end
    end
  end
  return n, charged
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

local function policy_state(P, policy, charged)
  local unpublished, whose, last = 0, turn(P)
  for _, n in ipairs(call('HVALS', K.unpublished(P, policy))) do unpublished = unpublished + tonumber(n) end
  return { policy, call('SCARD', K.outstanding(P, policy)), call('ZCARD', K.ready(P, policy)), unpublished,
    free_credit(P, policy, 0), call('HGETALL', K.policy(P, policy)), call('HGETALL', K.staleness(P, policy)),
    call('LRANGE', K.recent(P, policy), 0, -1), call('HGETALL', K.unpublished(P, policy)), call('HLEN', K.steps(P, policy)), last_entry(K.consumed(P, policy)),
    charged or 0, whose or '', last or 0 }
end

-- Training tasks that a node without lag may be given now, whether or not they are there.
local function admitted_now(P)
  local credit = {}
  for _, policy in ipairs(policies(P)) do
    local f = call('HMGET', K.policy(P, policy), 'version', 'external')
    if not f[1] and f[2] ~= '1' then return 0 end
    credit[policy] = free_credit(P, policy, 0)
  end
  return admitted(P, trained_roles(P), credit)
end

-- audit. Returns { now, run state, counters, { assembling, ready, in_batch } as stored, dead letters, queued tasks, exhausted, retries, policy
-- states, tasks admitted }.
local function audit(keys)
  local P = keys[1]
  local ready, in_batch, states = 0, 0, {}
  local assembling, charged = held_in_tasks(P)
  for _, policy in ipairs(policies(P)) do
    ready = ready + held_in_ready(P, policy)
    in_batch = in_batch + held_in_batches(P, policy)
    states[#states + 1] = policy_state(P, policy, charged[policy])
  end
  local f = call('HMGET', K.run(P), 'state', 'exhausted')
  local lane = K.lane(P, TRAIN)
  local queued = call('XLEN', lane) - call('XPENDING', lane, GROUP)[1]
  return { now_ms(), f[1] or '', call('HGETALL', K.counters(P)), { assembling, ready, in_batch }, call('XLEN', K.dead(P)), queued, f[2] or '0',
    call('ZCARD', K.retry(P, TRAIN)), states, admitted_now(P) }
end

-- supply. Returns { cursor, exhausted, state, queued, tasks admitted } for the curator.
local function supply(keys)
  local P = keys[1]
  local f = call('HMGET', K.run(P), 'cursor', 'exhausted', 'state')
  local lane = K.lane(P, TRAIN)
  return { tonumber(f[1]), f[2], f[3], call('XLEN', lane) - call('XPENDING', lane, GROUP)[1], admitted_now(P) }
end
