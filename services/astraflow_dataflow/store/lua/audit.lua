-- Conservation: the counters and, beside them, what the stored groups and batches really hold. Small runs are counted in one atomic snapshot, large
-- ones in slices, which say so when something moved between them.

local function count_task(P, task, policy_of, out)
  local f = call('HMGET', K.task(P, task), 'held', 'credited')
  out.assembling = out.assembling + tonumber(f[1] or 0)
  for _, role in ipairs(split(f[2])) do
    out.charged[policy_of[role]] = (out.charged[policy_of[role]] or 0) + 1
  end
end

local function size_of(P, gid)
  local n = 0
  for _ in string.gmatch(call('HGET', K.group(P, gid), 'ids') or '', '[^\n]+') do n = n + 1 end
  return n
end

-- Bound batches that are not trained on; each of them has a lease.
local function count_batches(P, out)
  for _, id in ipairs(call('ZRANGE', K.batch_leases(P), 0, -1)) do
    for _, gid in ipairs(split(call('HGET', K.batch(P, id), 'groups'))) do out.in_batch = out.in_batch + size_of(P, gid) end
  end
end

-- Counts at most `limit` tasks and groups from place `at` on, which is a list of them and how many of it are behind. Returns what they hold, and the
-- place to go on from or nil.
local function count_some(P, at, limit)
  local out, policy_of, places = { assembling = 0, ready = 0, in_batch = 0, charged = {} }, {}, { K.open(P), K.settling(P) }
  for _, role in ipairs(trained_roles(P)) do policy_of[role.name] = role.policy end
  for _, policy in ipairs(policies(P)) do places[#places + 1] = K.ready(P, policy) end
  while places[at.list] do
    local some = call('ZRANGE', places[at.list], at.behind, at.behind + limit - 1)
    for _, id in ipairs(some) do
      if at.list <= 2 then count_task(P, id, policy_of, out) else out.ready = out.ready + size_of(P, id) end
    end
    limit = limit - #some
    if limit == 0 then return out, { list = at.list, behind = at.behind + #some } end
    at = { list = at.list + 1, behind = 0 }
  end
  count_batches(P, out)
  return out, nil
end

local function is_small(P, limit)
  local n = call('ZCARD', K.open(P)) + call('ZCARD', K.settling(P))
  for _, policy in ipairs(policies(P)) do n = n + call('ZCARD', K.ready(P, policy)) end
  return n < limit
end

-- recount: most tasks and groups, list and how many of it are behind, where an earlier slice ended. Returns { moves so far, next list or 0, behind,
-- { assembling, ready, in_batch } as stored, the same as counted, { policy, charged as stored, as counted }... }: of this slice what is stored, of
-- the whole run what is counted.
SIGNATURE.recount = { 'limit', 'list', 'behind' }
function F.recount(keys, a)
  local P, credit = keys[1], {}
  local out, rest = count_some(P, { list = tonumber(a.list), behind = tonumber(a.behind) }, tonumber(a.limit))
  local f = call('HMGET', K.counters(P), 'moved', 'assembling', 'ready', 'in_batch')
  for _, policy in ipairs(policies(P)) do
    credit[#credit + 1] = { policy, out.charged[policy] or 0, call('SCARD', K.outstanding(P, policy)) }
  end
  rest = rest or { list = 0, behind = 0 }
  return { tonumber(f[1] or 0), rest.list, rest.behind, { out.assembling, out.ready, out.in_batch },
    { tonumber(f[2] or 0), tonumber(f[3] or 0), tonumber(f[4] or 0) }, credit }
end

local function last_entry(stream)
  local newest = call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  return newest[1] and newest[1][1] or ''
end

local function policy_state(P, policy, charged)
  local unpublished, whose, last = 0, turn(P)
  local credit, held = free_credit(P, policy, 0)
  local outstanding = call('SCARD', K.outstanding(P, policy))
  for _, n in ipairs(call('HVALS', K.unpublished(P, policy))) do unpublished = unpublished + tonumber(n) end
  return { policy, outstanding, call('ZCARD', K.ready(P, policy)), unpublished,
    credit, call('HGETALL', K.policy(P, policy)), call('HGETALL', K.staleness(P, policy)),
    call('LRANGE', K.recent(P, policy), 0, -1), call('HGETALL', K.unpublished(P, policy)), call('HLEN', K.steps(P, policy)), last_entry(K.consumed(P, policy)),
    charged and (charged[policy] or 0) or outstanding, whose or '', last or 0, held }
end

-- audit: most tasks and groups that are counted. Returns { now, run state, counters, { assembling, ready, in_batch } as stored or {} in a run with
-- more, dead letters, queued tasks, exhausted, retries, policy states, tasks admitted, leases, most leases or '0' }.
SIGNATURE.audit = { 'limit' }
function F.audit(keys, a)
  local P, states, held, charged = keys[1], {}, {}, nil
  if is_small(P, tonumber(a.limit)) then
    local out = count_some(P, { list = 1, behind = 0 }, tonumber(a.limit))
    held, charged = { out.assembling, out.ready, out.in_batch }, out.charged
  end
  for _, policy in ipairs(policies(P)) do states[#states + 1] = policy_state(P, policy, charged) end
  local f = call('HMGET', K.run(P), 'state', 'exhausted')
  return { now_ms(), f[1] or '', call('HGETALL', K.counters(P)), held, call('XLEN', K.dead(P)), queued(P), f[2] or '0',
    call('ZCARD', K.retry(P, TRAIN)), states, admitted_now(P),
    call('ZCARD', K.leases(P)), run_of(P).max_leases or '0' }
end

-- supply. Returns { cursor, exhausted, state, queued, tasks admitted } for the curator.
function F.supply(keys)
  local P = keys[1]
  local f = call('HMGET', K.run(P), 'cursor', 'exhausted', 'state')
  return { tonumber(f[1]), f[2], f[3], queued(P), admitted_now(P) }
end
