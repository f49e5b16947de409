-- What operators change: nodes ordered to leave, pins, and tasks that nobody tries again.

local DEAD_PER_CALL = 500
local MAX_PINS = 1000

local function unknown_node(node)
  return refuse('NOTFOUND', 'node ' .. node .. ' has not joined this run; ListNodes shows who has')
end

-- drain: node, reason. The node gets nothing more from now on. Returns { leases held, '1' when connected }.
SIGNATURE.drain = { 'node', 'reason' }
function F.drain(keys, a)
  local P, N = keys[1], K.node(keys[1], a.node)
  if call('EXISTS', N) == 0 then return unknown_node(a.node) end
  drain(P, a.node, a.reason)
  local connected = tonumber(call('HGET', N, 'connected_until') or 0) > now_ms()
  return { call('SCARD', K.node_leases(P, a.node)), connected and '1' or '0' }
end

-- undrain: node. It may have leases again. Returns why it was drained, or ''.
SIGNATURE.undrain = { 'node' }
function F.undrain(keys, a)
  local P, N = keys[1], K.node(keys[1], a.node)
  if call('EXISTS', N) == 0 then return unknown_node(a.node) end
  local reason = call('HGET', N, 'drain')
  call('HDEL', N, 'drain', 'poison', 'poison_at')
  if reason then history.event(P, 'node_undrained', a.node, reason) end
  emit(P, 'work')
  return reason or ''
end

-- pin: policy, version, reason. Returns the time of the pin; pinning again keeps it and replaces the reason.
SIGNATURE.pin = { 'policy', 'version', 'reason' }
function F.pin(keys, a)
  local P, pins = keys[1], K.pins(keys[1], a.policy)
  if call('HEXISTS', K.versions(P, a.policy), a.version) == 0 then
    return refuse('NOTFOUND', 'version ' .. a.version .. ' of ' .. a.policy .. ' is not announced; ListVersions shows those that are')
  end
  local known = call('HGET', pins, a.version)
  if not known and call('HLEN', pins) >= MAX_PINS then
    return refuse('PRECONDITION', a.policy .. ' has ' .. MAX_PINS .. ' pins, the most there may be; unpin some')
  end
  local ms = known and string.match(known, '^%d+') or tostring(now_ms())
  call('HSET', pins, a.version, ms .. ' ' .. a.reason)
  return ms
end

-- unpin: policy, version. Returns 1 when it was pinned.
SIGNATURE.unpin = { 'policy', 'version' }
function F.unpin(keys, a)
  return call('HDEL', K.pins(keys[1], a.policy), a.version)
end

local function fields_of(entry)
  local f = {}
  for i = 1, #entry[2], 2 do f[entry[2][i]] = entry[2][i + 1] end
  return f
end

-- A dead task becomes a queued one. Episodes that came before were dropped with their group: repeated, they are duplicates.
local function revive(P, f)
  local task, T, size = f.task, K.task(P, f.task), tonumber(f.size)
  local names = {}
  for i = 0, size - 1 do names[#names + 1] = 'm' .. i end
  for i, member in ipairs(call('HMGET', T, unpack(names))) do
    if member then
      call('HSET', T, 'r' .. string.sub(member, 2), 'DUPLICATE ', 'refused', 1)
      call('HDEL', T, names[i])
    end
  end
  call('HDEL', T, 'why', 'credited', 'uncredited', 'avoid', 'node', 'letter', 'held')
  local lane = lane_of(P, call('HGET', T, 'priority') or '0')
  local entry = call('XADD', K.lane(P, lane), '*', 'task', task)
  call('HSET', T, 'state', 'queued', 'attempt', f.attempt, 'tries', 0, 'size', size, 'left', size, 'lane', lane, 'entry', entry,
    'evaluation', '', 'spec', f.spec)
  call('PERSIST', T)
  call('PERSIST', K.trace(P, task))
  note(P, task, 'X')
end

-- requeue: letter ids, or none for the oldest. Returns { requeued, unknown, kept }.
SIGNATURE.requeue = { rest = true }
function F.requeue(keys, a)
  local P, requeued, unknown, kept, entries = keys[1], 0, 0, 0, {}
  if run_of(P).state ~= 'active' then
    return refuse('PRECONDITION', 'the run takes no tasks any more; create a new run')
  end
  if #a.rest == 0 then entries = call('XRANGE', K.dead(P), '-', '+', 'COUNT', DEAD_PER_CALL) end
  for _, id in ipairs(a.rest) do
    local found = call('XRANGE', K.dead(P), id, id)
    if found[1] then entries[#entries + 1] = found[1] else unknown = unknown + 1 end
  end
  for _, entry in ipairs(entries) do
    local f = fields_of(entry)
    local state = call('HGET', K.task(P, f.task), 'state')
    if f.evaluation ~= '' or (state and state ~= 'done') then
      kept = kept + 1
    elseif call('XDEL', K.dead(P), entry[1]) == 1 then
      revive(P, f)
      requeued = requeued + 1
    end
  end
  if requeued > 0 then emit(P, 'work') end
  return { requeued, unknown, kept }
end

-- purge: letter ids, or none for all. Returns how many were forgotten.
SIGNATURE.purge = { rest = true }
function F.purge(keys, a)
  local P = keys[1]
  if #a.rest == 0 then return call('XTRIM', K.dead(P), 'MAXLEN', 0) end
  return call('XDEL', K.dead(P), unpack(a.rest))
end

-- refused: nodes. Returns { tasks that all of them refused, one of these, since when }, looking at the oldest that wait to be tried again.
SIGNATURE.refused = { rest = true }
function F.refused(keys, a)
  local P, n, example, since = keys[1], 0, '', 0
  local lanes = call('HKEYS', K.open_evaluations(P))
  lanes[#lanes + 1] = TRAIN
  for _, lane in ipairs(lanes) do
    local waiting = call('ZRANGE', K.retry(P, lane), 0, 255, 'WITHSCORES')
    for i = 1, #waiting, 2 do
      local everywhere = #a.rest > 0
      for _, node in ipairs(a.rest) do everywhere = everywhere and avoids(P, waiting[i], node) end
      if everywhere then
        n = n + 1
        local due = tonumber(waiting[i + 1])
        if since == 0 or due < since then example, since = waiting[i], due end
      end
    end
  end
  return { n, example, since }
end

-- beat. Writes something, so that waiting for it to be safe means that all before it is.
function F.beat(keys)
  return call('INCR', keys[1])
end
