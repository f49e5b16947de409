-- Tasks: submit, lease, renew, give back, expire. Task states:
-- queued -> leased <-> retry -> complete -> done (training) | done (evaluation), see settle.lua.

-- The lane of training tasks of a priority, which is made with the first of them.
local function lane_of(P, priority)
  if priority == '0' then return TRAIN end
  local lane, known = TRAIN .. ':' .. priority, run_of(P).priorities or ''
  if not string.find(known, priority, 1, true) then
    local all = {}
    for digit in string.gmatch(known .. priority, '%d') do all[#all + 1] = digit end
    table.sort(all, function(a, b) return a > b end)
    run_of(P).priorities = table.concat(all)
    call('HSET', K.run(P), 'priorities', run_of(P).priorities)
    call('XGROUP', 'CREATE', K.lane(P, lane), GROUP, '0', 'MKSTREAM')
  end
  return lane
end

local function add_task(P, evaluation, item)
  local id, size = item.id, tonumber(item.size)
  if call('SADD', K.known(P), id) == 0 then return false end
  local lane = evaluation ~= '' and evaluation or lane_of(P, item.priority)
  local entry = call('XADD', K.lane(P, lane), '*', 'task', id)
  call('HSET', K.task(P, id), 'priority', item.priority, 'spec', item.spec, 'state', 'queued', 'attempt', 0, 'tries', 0, 'size', size, 'left', size,
    'lane', lane, 'entry', entry, 'evaluation', evaluation, 'digest', item.digest)
  return true
end

-- Leases that the run may have at a time.
local function max_leases(P)
  local most = tonumber(run_of(P).max_leases or 0)
  return most > 0 and most or math.huge
end

-- Removes what points at a running lease; its holder learns of it unless it ended the lease itself.
local function leave_lease(P, task, node, attempt, reason, quiet_node)
  gather('ZREM', K.leases(P), task)
  gather('SREM', K.node_leases(P, node), task)
  if max_leases(P) < math.huge then emit(P, 'work') end
  if node ~= quiet_node then tell_lost(node, task .. '#' .. attempt, reason) end
end

-- Ends the lease of a task if it has one, by its state, node and attempt; `outcome` is for the trace.
local function end_lease_of(P, task, state, node, attempt, reason, quiet_node, outcome)
  if state ~= 'leased' then return gather('ZREM', K.leases(P), task) end
  note(P, task, 'l', attempt, outcome)
  leave_lease(P, task, node, attempt, reason, quiet_node)
end

local function end_lease(P, task, reason, quiet_node, outcome)
  local f = call('HMGET', K.task(P, task), 'state', 'node', 'attempt')
  end_lease_of(P, task, f[1], f[2], f[3], reason, quiet_node, outcome)
end

-- Ends the second copy of a task (a hedge), if one is out; `copy` is the task's field: attempt and node, or '-' once it is over. A task gets one at
-- most. Its holder learns of it unless it ended the copy itself.
local function end_copy(P, task, copy, reason, quiet_node, outcome)
  local attempt, node = string.match(copy or '', '^(%d+) (.+)$')
  if not attempt then return end
  call('HSET', K.task(P, task), 'copy', '-')
  call('ZREM', K.copies(P), task)
  note(P, task, 'h', attempt, outcome)
  if node ~= quiet_node then tell_lost(node, task .. '#' .. attempt .. '-h', reason) end
end

-- A task is open from its first lease or episode until it is complete; `times` is deadline and task of each. The first of all wakes who sweeps the run.
local function open_tasks(P, times)
  local added = 0
  for _, n in ipairs(call_many({ 'ZADD', K.open(P), 'NX' }, times)) do added = added + n end
  if added == 0 then return end
  move()
  if not CALL.opened and call('ZCARD', K.open(P)) == added then emit(P, 'due') end
  CALL.opened = true
end

local function leave_queue(P, lane, entry)
  move()
  if not lane then return end
  gather('XACK', K.lane(P, lane), entry)
  gather('XDEL', K.lane(P, lane), entry)
end

local function leave_lane(P, task, lane, entry)
  leave_queue(P, lane, entry)
  if lane then gather('ZREM', retries(P, lane), task) end
  gather('ZREM', K.open(P), task)
end

-- Leaves what repeated pushes need (members, refusals) and lets even that end some day; further fields and values are written, too.
local function entomb(P, task, ttl_ms, ...)
  call('HSET', K.task(P, task), 'state', 'done', ...)
  call('HDEL', K.task(P, task), 'spec', 'lane', 'entry', 'credited', 'uncredited', 'avoid', 'copy', 'held')
  call('PEXPIRE', K.task(P, task), ttl_ms)
  close_trace(P, task, ttl_ms)
end

-- Nodes may get the versions that a pass held back.
local function release_versions(P, id)
  for _, line in ipairs(split(call('HGET', K.evaluation(P, id), 'versions'))) do emit(P, 'version ' .. string.match(line, '^%S+')) end
  emit(P, 'work')
end

local function finish_evaluation(P, id)
  local E = K.evaluation(P, id)
  local f = call('HMGET', E, 'planned', 'done', 'failed', 'state')
  if f[4] == 'open' and tonumber(f[2]) + tonumber(f[3]) >= tonumber(f[1]) then
    call('HSET', E, 'state', 'complete', 'complete_ms', now_ms())
    call('HDEL', K.open_evaluations(P), id)
    call('UNLINK', K.lane(P, id), K.retry(P, id), K.evaluation_tasks(P, id))
    release_versions(P, id)
  end
end

-- Ends a task whose members will not all come. Training tasks go on to settle; evaluation tasks end here.
local function close_task(P, task, why, now, outcome)
  local T = K.task(P, task)
  local f = call('HMGET', T, 'state', 'evaluation', 'lane', 'entry', 'copy')
  if not is_open(f[1]) then return false end
  move()
  end_lease(P, task, 'group_closed', '', outcome or why)
  end_copy(P, task, f[5], 'group_closed', '', outcome or why)
  note(P, task, 'C', why)
  if f[2] ~= '' then
    leave_lane(P, task, f[3], f[4])
    entomb(P, task, 86400000)
    call('HINCRBY', K.evaluation(P, f[2]), 'failed', 1)
    finish_evaluation(P, f[2])
  else
    call('HSET', T, 'state', 'complete', 'why', why)
    call('ZREM', K.open(P), task)
    call('ZREM', K.retry(P, TRAIN), task)
    call('ZADD', K.settling(P), now, task)
    emit(P, 'work')
  end
  return true
end

local function bury(P, task, reason, detail, now)
  local f = call('HMGET', K.task(P, task), 'attempt', 'node', 'size', 'evaluation', 'spec')
  local letter = call('XADD', K.dead(P), 'MAXLEN', '~', MAX.dead, '*', 'task', task, 'reason', reason, 'detail', detail,
    'attempt', f[1], 'node', f[2] or '', 'size', f[3], 'evaluation', f[4], 'spec', f[5])
  call('HSET', K.task(P, task), 'letter', letter)
  close_task(P, task, 'dead_letter', now, reason)
end

local SENDS_POISON = 'its node was drained: it sends poison'

-- Whether a node was drained for poison, which a call asks once of each.
local function is_poisonous(P, node)
  CALL.drains = CALL.drains or {}
  CALL.drains[node] = CALL.drains[node] or call('HGET', K.node(P, node), 'drain') or ''
  return CALL.drains[node] == 'poison'
end

-- Another node gets the task, or nobody when its tries are spent. Returns true when it will be leased again; what takes it away in the same call
-- must write what is gathered first.
local function give_again(P, task, reason, detail, now, due, quiet_node)
  local T = K.task(P, task)
  local f = call('HMGET', T, 'tries', 'lane', 'state', 'node', 'attempt')
  if reason == 'lease_expired' and is_poisonous(P, f[4]) then
    f[1], reason, detail = call('HINCRBY', T, 'tries', -1), 'poison', SENDS_POISON
  end
  if tonumber(f[1]) >= tonumber(run_of(P).max_attempts) then
    bury(P, task, reason, detail, now)
    return false
  end
  end_lease_of(P, task, f[3], f[4], f[5], 'lease_lost', quiet_node, reason)
  call('HSET', T, 'state', 'retry')
  gather('ZADD', retries(P, f[2]), due, task)
  emit(P, 'work')
  return true
end

-- Gives back a lease whose node cannot help it, or whose task cannot; costs no attempt.
local function give_back(P, task, reason, detail, now)
  call('HINCRBY', K.task(P, task), 'tries', -1)
  give_again(P, task, reason, detail, now, now, '')
end

-- Orders a node to leave: it gets nothing more from now on, and learns of it on its stream.
local function drain(P, node, reason)
  call('HSET', K.node(P, node), 'drain', reason)
  history.event(P, 'node_drained', node, reason)
  emit(P, 'node ' .. node, 'drain', reason)
end

-- Counts an episode that was refused as poison. A node with more than `max_poison` of them beyond one in ACCEPTED_PER_POISON is drained, and what
-- it holds is given to others at once. What was accepted since is taken off when the next one comes, so that good episodes cost nothing here.
local function note_poison(P, node)
  if call('SISMEMBER', K.nodes(P), node) == 0 then return end
  local N, most = K.node(P, node), tonumber(run_of(P).max_poison or 0)
  call('HINCRBY', N, 'poisoned', 1)
  local f = call('HMGET', N, 'episodes', 'poison', 'poison_at', 'drain')
  local accepted = tonumber(f[1] or 0)
  local poison = math.max(0, tonumber(f[2] or 0) - (accepted - tonumber(f[3] or 0)) / ACCEPTED_PER_POISON) + 1
  call('HSET', N, 'poison', precise(poison), 'poison_at', accepted)
  if most == 0 or poison <= most or f[4] == 'poison' then return end
  drain(P, node, 'poison')
  local now, rest = now_ms(), {}
  for i, task in ipairs(call('SMEMBERS', K.node_leases(P, node))) do
    if i <= MAX.given_back then give_back(P, task, 'poison', SENDS_POISON, now) else rest[#rest + 1], rest[#rest + 2] = now, task end
  end
  call_many({ 'ZADD', K.leases(P), 'XX' }, rest)
end

-- A block of its own: Lua has room for 200 local names outside.
do

-- Whether the task that has the id of a task is another one, and its specification, '' once it is done. Of one that was forgotten since nothing is
-- known but its id.
local function is_another(P, item)
  local f = call('HMGET', K.task(P, item.id), 'digest', 'spec')
  return f[1] and f[1] ~= item.digest, f[2] or ''
end

-- The first of some tasks whose id another one has, in the run or before it among them: its id, and the specification of the other; or nothing.
local function first_conflict(P, items)
  local ids, before = {}, {}
  for i, item in ipairs(items) do ids[i] = item.id end
  for i, known in ipairs(call_many({ 'SMISMEMBER', K.known(P) }, ids)) do
    local item, other = items[i], before[ids[i]]
    before[item.id] = other or item
    if other and other.digest ~= item.digest then return { item.id, other.spec } end
    local differs, spec
    if known == 1 then differs, spec = is_another(P, item) end
    if differs then return { item.id, spec } end
  end
  return {}
end

-- submit: then per task what every function that adds some takes; the digest is the first bytes of that of the specification. Returns { number of
-- new tasks }, or { 0, id, specification } of one whose id another task has, and adds none.
SIGNATURE.submit = { each = { 'id', 'size', 'spec', 'priority', 'digest' } }
function F.submit(keys, a)
  local P, fresh = keys[1], 0
  if run_of(P).state ~= 'active' then
    return refuse('PRECONDITION', 'the run takes no tasks any more; create a new run')
  end
  local differing = first_conflict(P, a.each)
  for _, item in ipairs(differing[1] and {} or a.each) do
    if add_task(P, '', item) then fresh = fresh + 1 end
  end
  if fresh > 0 then emit(P, 'work') end
  return { fresh, unpack(differing) }
end

-- feed: expected cursor, next cursor, '1' when the data set ended, then tasks as of `submit`. Compare-and-set on the cursor: of two servers
-- feeding at once one does nothing. Returns { number of new tasks, or -1 for that one, ids... } of tasks that are left out, for others have them.
SIGNATURE.feed = { 'expected', 'next', 'exhausted', each = SIGNATURE.submit.each }
function F.feed(keys, a)
  local P = keys[1]
  local f = call('HMGET', K.run(P), 'cursor', 'state')
  if f[1] ~= a.expected or f[2] ~= 'active' then return { -1 } end
  call('HSET', K.run(P), 'cursor', a.next, 'exhausted', a.exhausted)
  local fresh, left_out = 0, {}
  for _, item in ipairs(a.each) do
    if add_task(P, '', item) then
      fresh = fresh + 1
    elseif is_another(P, item) then
      left_out[#left_out + 1] = item.id
      history.event(P, 'task_conflict', item.id, 'a task of the data set is left out: another has its id')
    end
  end
  if fresh > 0 then emit(P, 'work') end
  return { fresh, unpack(left_out) }
end

end

-- Whether the trainer of a policy has released it: it trains no more, and is not waited for.
local function has_ended(P, policy)
  CALL.ended = CALL.ended or {}
  if CALL.ended[policy] == nil then
    local f = call('HMGET', K.policy(P, policy), 'epoch', 'heard_ms')
    CALL.ended[policy] = f[1] ~= '0' and not f[2]
  end
  return CALL.ended[policy]
end

-- Policy and step of a batch that is bound or trained on and whose version is not announced, or nil.
local function in_training(P)
  for _, policy in ipairs(policies(P)) do
    local step = call('HKEYS', K.unpublished(P, policy))[1]
    if step then return policy .. ' ' .. step end
  end
  return nil
end

-- Groups between lease and batch that a barrier leaves room for, and what holds the next ones back: `batch` until the one that is sampled is
-- bound, `training` with policy and step until their version is announced, `ended` where nobody trains any more.
local function behind_barrier(P, policy, barrier, of_step, ready)
  local trains = barrier == 'phase' and in_training(P)
  if trains then return 0, 'training ' .. trains end
  if has_ended(P, policy) then return 0, 'ended' end
  return of_step - ready, 'batch'
end

-- Groups that may still be leased for a policy: equation 5.1 of the protocol solved for new groups. A node that serves `lag` versions
-- less than the newest samples with weights that are that much older already: its window is that many steps shorter. Of policies that take
-- turns one has room, and only for the steps that are left of its turn. Returns what holds groups back as well, where that is a barrier.
local function free_credit(P, policy, lag)
  local whose, last = turn(P)
  if whose and whose ~= policy then return 0, '' end
  local f = call('HMGET', K.policy(P, policy), 'window', 'floor', 'acceptance', 'max_staleness', 'finished', 'groups_per_step', 'barrier')
  local survives = math.max(tonumber(f[3]), tonumber(f[2]))
  local unpublished, bound, of_step = 0, 0, call('HGETALL', K.unpublished(P, policy))
  for i = 1, #of_step, 2 do
    local n = tonumber(of_step[i + 1])
    unpublished = unpublished + n
    if tonumber(of_step[i]) > tonumber(f[5]) then bound = bound + n end
  end
  local window = tonumber(f[1]) * (1 - lag / (tonumber(f[4]) + 1))
  local ready = call('ZCARD', K.ready(P, policy))
  local room = window - ready - unpublished
  if whose then room = math.min(room, (last - tonumber(f[5])) * tonumber(f[6]) - ready - bound) end
  local held = ''
  if f[7] and f[7] ~= 'none' then
    local allowed, why = behind_barrier(P, policy, f[7], tonumber(f[6]), ready)
    if allowed < room or why ~= 'batch' then room, held = math.min(allowed, room), why end
  end
  return math.max(0, math.floor(room / survives - call('SCARD', K.outstanding(P, policy)) + 1e-9)), held
end

-- The members of a task that are still to come, by its size and how many are left.
local function missing_members(P, task, size, left)
  local names, missing = {}, {}
  for i = 0, tonumber(size) - 1 do names[#names + 1] = 'm' .. i end
  local filled = left == size and {} or call('HMGET', K.task(P, task), unpack(names))
  for i = 1, #names do
    if not filled[i] then missing[#missing + 1] = i - 1 end
  end
  return table.concat(missing, ',')
end

local GRANT_FIELDS = { 'state', 'size', 'left', 'spec', 'uncredited', 'attempt', 'tries', 'avoid', 'credited', 'lane', 'entry' }

-- What leasing a task needs to know of it.
local function read_grant(P, task)
  local f = { task = task }
  for i, value in ipairs(call('HMGET', K.task(P, task), unpack(GRANT_FIELDS))) do f[GRANT_FIELDS[i]] = value or nil end
  return f
end

-- Notes a lease in the trace of its task, and begins it where there is none: a task that nobody had, and of which nothing came, never has one.
local function trace_lease(P, f, attempt, node)
  local entry = trace_entry('L', attempt, node)
  local is_new = attempt == 1 and f.left == f.size
  if not is_new and note_all(P, f.task, { entry }) > 0 then return end
  begin_trace(P, f.task, f.lane, f.entry, entry)
end

-- Leases a task, of which `f` is what `read_grant` says; `without` are roles that this attempt leaves out, besides those that have no credit.
-- `charged` is what `charge` says of a task that is leased for the first time. `write_grants` must follow.
local function grant(P, node, f, ttl, horizon, now, without, charged)
  local attempt, g = tonumber(f.attempt) + 1, CALL.grants or { leases = {}, tasks = {}, open = {} }
  CALL.grants = g
  call('HSET', K.task(P, f.task), 'state', 'leased', 'node', node, 'attempt', attempt, 'tries', tonumber(f.tries) + 1, 'leased_ms', now,
    unpack(charged or {}))
  local n = #g.tasks
  g.tasks[n + 1] = f.task
  g.leases[2 * n + 1], g.leases[2 * n + 2] = now + ttl, f.task
  g.open[2 * n + 1], g.open[2 * n + 2] = now + horizon, f.task
  trace_lease(P, f, attempt, node)
  local uncredited = split(charged and charged[4] or f.uncredited)
  for _, role in ipairs(without or {}) do uncredited[#uncredited + 1] = role end
  return { f.task, attempt, f.spec, missing_members(P, f.task, f.size, f.left), lines(uncredited) }
end

-- Writes what is the same for all leases granted since the last time.
local function write_grants(P, node)
  local g = CALL.grants
  if not g then return end
  CALL.grants = nil
  call_many({ 'ZADD', K.leases(P) }, g.leases)
  call_many({ 'SADD', K.node_leases(P, node) }, g.tasks)
  open_tasks(P, g.open)
end

local function is_avoided(names, node)
  return names and string.find(names, '\n' .. node .. '\n', 1, true) ~= nil
end

local function avoids(P, task, node)
  return is_avoided(call('HGET', K.task(P, task), 'avoid'), node)
end

-- Versions between the newest announced one and what a node says it serves. A node that says nothing at all has no lag; one that serves other
-- policies, and not this one, has all of it.
local function lag_of(P, policy, serving)
  if next(serving) == nil then return 0 end
  if not serving[policy] then return math.huge end
  return math.max(0, tonumber(call('HGET', K.policy(P, policy), 'version') or 0) - serving[policy])
end

-- The trained roles of policies that a node is too far behind to play.
local function unplayed(P, serving)
  local lacking = {}
  for _, role in ipairs(next(serving) and trained_roles(P) or {}) do
    local policy = role.policy
    lacking[role.name] = lag_of(P, policy, serving) > tonumber(call('HGET', K.policy(P, policy), 'max_staleness')) or nil
  end
  return lacking
end

-- Roles that were charged for a task, `credited`, and that this node cannot play now; nil when it must leave the task to others. It waits for a
-- node that plays all of them before one gets it that plays some.
local function unplayable(P, task, credited, cannot, lane, now)
  local left, lacking = 0, {}
  for _, name in ipairs(next(cannot) and split(credited) or {}) do
    if cannot[name] then lacking[#lacking + 1] = name else left = left + 1 end
  end
  if #lacking == 0 then return lacking end
  local waits = now - tonumber(call('ZSCORE', K.retry(P, lane), task)) < RELUCTANCE_MS
  if left == 0 or waits or run_of(P).admit == 'all' then return nil end
  return lacking
end

-- Tasks that are to be tried again and that a node cannot take are passed over, so many at most in one call.
local MOST_PASSED_OVER = 256

-- Of tasks that are due to be tried again those that a node takes, at most `most`: grants them, and returns them.
local function grant_retries(P, node, due, cannot, lane, most, ttl, horizon, now, out)
  local taken = {}
  for _, task in ipairs(due) do
    if #taken >= most then break end
    local f = read_grant(P, task)
    local without = not is_avoided(f.avoid, node) and unplayable(P, task, f.credited, cannot, lane, now)
    if without then
      taken[#taken + 1] = task
      out[#out + 1] = grant(P, node, f, ttl, horizon, now, without)
    end
  end
  call_many({ 'ZREM', K.retry(P, lane) }, taken)
  return #taken
end

-- A task that is tried again stays the pending entry of whoever had it first: its hash says whose it is.
local function lease_retries(P, node, serving, lane, want, ttl, horizon, now, out)
  local cannot, passed_over = nil, 0
  while #out < want and passed_over < MOST_PASSED_OVER do
    local most = want - #out
    local due = call('ZRANGEBYSCORE', K.retry(P, lane), '-inf', now, 'LIMIT', passed_over, most)
    cannot = cannot or (#due > 0 and unplayed(P, serving))
    passed_over = passed_over + #due - grant_retries(P, node, due, cannot, lane, most, ttl, horizon, now, out)
    if #due < most then break end
  end
  write_grants(P, node)
end

local function read_lane(P, node, lane, most)
  local reply = call('XREADGROUP', 'GROUP', GROUP, node, 'COUNT', most, 'STREAMS', K.lane(P, lane), '>')
  local found = {}
  if not reply then return found end
  for _, entry in ipairs(reply[1][2]) do
    local f = read_grant(P, entry[2][2])
    if is_open(f.state) then
      found[#found + 1] = f
    else
      call('XACK', K.lane(P, lane), GROUP, entry[1])
      call('XDEL', K.lane(P, lane), entry[1])
    end
  end
  return found
end

-- The next training tasks, at most `most`. Where there are several lanes it is one: of the most urgent lane first, but every fourth one of the
-- lanes in turn, so that of L lanes each that has tasks gets at least one of 4·L.
local function draw(P, node, most)
  local lanes = training_lanes(P)
  if #lanes > 1 then
    most = 1
    local n = call('HINCRBY', K.run(P), 'drawn', 1)
    if n % 4 == 0 then table.insert(lanes, 1, lanes[n / 4 % #lanes + 1]) end
  end
  for _, lane in ipairs(lanes) do
    local found = read_lane(P, node, lane, most)
    if #found > 0 then return found end
  end
  return {}
end

-- Tasks that may be charged with this credit, in groups per policy: under `all` each role needs a group, unless its policy has ended or it is
-- another one's turn; under `any` one is enough.
local function admitted(P, roles, credit)
  local needs, fewest, most, whose = {}, nil, 0, turn(P)
  for _, role in ipairs(roles) do needs[role.policy] = (needs[role.policy] or 0) + 1 end
  for policy, n in pairs(needs) do
    local whole = math.floor(credit[policy] / n)
    if policy == (whose or policy) and not has_ended(P, policy) then fewest = math.min(fewest or whole, whole) end
    most = math.max(most, math.ceil(credit[policy] / n))
  end
  return run_of(P).admit == 'all' and fewest or most
end

-- Charges one group to each role whose policy has credit; trajectories of the others will end as no_credit. Roles take turns to be first, so
-- that of two roles of one policy neither always gets its last group. Returns the fields that say so of the task; `charges` are what each set of
-- outstanding groups is to get.
local function charge(P, task, roles, credit, charges)
  local credited, uncredited = {}, {}
  local turn = #roles > 1 and call('HINCRBY', K.run(P), 'charges', 1) or 0
  for i = 1, #roles do
    local role = roles[(turn + i) % #roles + 1]
    if credit[role.policy] > 0 then
      credit[role.policy] = credit[role.policy] - 1
      credited[#credited + 1] = role.name
      local key = K.outstanding(P, role.policy)
      charges[key] = charges[key] or {}
      table.insert(charges[key], role.name .. ' ' .. task)
    else
      uncredited[#uncredited + 1] = role.name
    end
  end
  move()
  if #uncredited == 0 then return { 'credited', lines(credited) } end
  return { 'credited', lines(credited), 'uncredited', lines(uncredited) }
end

-- Why nobody may train now, or nil.
local function barred(P)
  if run_of(P).state ~= 'active' then return 'run_finished' end
  for _, policy in ipairs(policies(P)) do
    local f = call('HMGET', K.policy(P, policy), 'version', 'external', 'barrier')
    if not f[1] and f[2] ~= '1' then return 'no_version' end
    if f[3] == 'phase' and call('HLEN', K.unpublished(P, policy)) > 0 then return 'barrier' end
  end
  return nil
end

-- Why a node without credit gets nothing. `serving` maps policy to the version the node says it serves.
local function no_room(P, serving)
  local reason = 'staleness_window'
  for _, role in ipairs(trained_roles(P)) do
    local policy = role.policy
    local lag, credit, held = lag_of(P, policy, serving), free_credit(P, policy, 0)
    if lag > tonumber(call('HGET', K.policy(P, policy), 'max_staleness')) and credit > 0 then
      return lag == math.huge and 'policy_not_served' or 'node_behind'
    end
    if held ~= '' then reason = 'barrier' end
  end
  return reason
end

-- Of the places of a node those that evaluations on request may still take while there is training: `share` percent of those it has, at least one.
local function room_on_request(P, node, want, share)
  local held, evaluating = call('SMEMBERS', K.node_leases(P, node)), 0
  for _, task in ipairs(held) do
    if string.sub(task, 1, 5) == 'eval:' then evaluating = evaluating + 1 end
  end
  return math.max(0, math.max(1, math.floor((#held + want) * share / 100)) - evaluating)
end

-- Evaluation leases go to nodes that serve exactly the versions; they come before training, those on request up to their `share`.
local function lease_evaluations(P, node, serving, most, ttl, horizon, now, out, share)
  local open = call('HGETALL', K.open_evaluations(P))
  for i = 1, #open, 2 do
    local want = most
    if share and call('HGET', K.evaluation(P, open[i]), 'requested') then want = math.min(most, #out + room_on_request(P, node, most, share)) end
    local served = true
    for _, line in ipairs(split(open[i + 1])) do
      local policy, version = string.match(line, '^(%S+) (%d+)$')
      served = served and serving[policy] == tonumber(version)
    end
    if served and want > #out then
      lease_retries(P, node, serving, open[i], want, ttl, horizon, now, out)
      for _, f in ipairs(want > #out and read_lane(P, node, open[i], want - #out) or {}) do
        out[#out + 1] = grant(P, node, f, ttl, horizon, now)
      end
      write_grants(P, node)
    end
  end
end

-- Returns why nothing more was leased for training, or nil when `want` was reached.
local function lease_training(P, node, serving, want, fresh, ttl, horizon, now, out)
  local reason = barred(P)
  if reason then return reason end
  lease_retries(P, node, serving, TRAIN, want, ttl, horizon, now, out)
  local roles, credit = trained_roles(P), {}
  for _, policy in ipairs(policies(P)) do credit[policy] = (free_credit(P, policy, lag_of(P, policy, serving))) end
  while #out < want do
    if #out >= fresh then return 'slow_node' end
    -- Charging a task makes this smaller by one, so as many can be drawn at once.
    local room = admitted(P, roles, credit)
    if room <= 0 then return no_room(P, serving) end
    local found = draw(P, node, math.min(room, math.min(want, fresh) - #out))
    local charges = {}
    for _, f in ipairs(found) do
      out[#out + 1] = grant(P, node, f, ttl, horizon, now, nil, charge(P, f.task, roles, credit, charges))
    end
    write_grants(P, node)
    for key, charged in pairs(charges) do call_many({ 'SADD', key }, charged) end
    if #found > 0 then
      -- There may be more.
    elseif queued(P) == 0 then
      if call('HGET', K.run(P), 'exhausted') == '1' then return 'dataset_exhausted' end
      emit(P, 'due') -- the run loop has not drawn enough, or does not know yet that there are no more
      return 'no_tasks'
    end
  end
  return nil
end

-- The oldest open tasks that one call looks through for some that wait for a straggler.
local MOST_LOOKED_AT = 64

-- Leases second copies of training tasks whose lease is older than `after` ms to a node that finds nothing else to do, while copies are at most
-- `share` of the leases, or one. Whichever copy of a member comes first is taken.
local function lease_copies(P, node, serving, want, after, share, ttl, now, out)
  if next(unplayed(P, serving)) then return end
  local room = math.max(1, math.floor(share * call('ZCARD', K.leases(P)))) - call('ZCARD', K.copies(P))
  for _, task in ipairs(room > 0 and call('ZRANGE', K.open(P), 0, MOST_LOOKED_AT - 1) or {}) do
    if room <= 0 or #out >= want then return end
    local f = call('HMGET', K.task(P, task), 'state', 'evaluation', 'node', 'leased_ms', 'copy', 'avoid', 'attempt', 'spec', 'size', 'left', 'uncredited')
    local waits = f[1] == 'leased' and f[2] == '' and not f[5] and now - tonumber(f[4]) > after
    if waits and f[3] ~= node and not is_avoided(f[6], node) then
      call('HSET', K.task(P, task), 'copy', f[7] .. ' ' .. node)
      call('ZADD', K.copies(P), now + ttl, task)
      note(P, task, 'H', f[7], node)
      out[#out + 1] = { task, tonumber(f[7]), f[8], missing_members(P, task, f[9], f[10]), f[11] or '', '1' }
      room = room - 1
    end
  end
end

-- Whether another node might get something that this one did not ask for or may not have.
local function is_more(P, serving, reason)
  if reason == 'lease_quota' then return false end
  if not reason or reason == 'node_full' or reason == 'slow_node' or reason == 'node_behind' or reason == 'policy_not_served' then return true end
  if call('HLEN', K.open_evaluations(P)) > 0 or call('ZCARD', K.retry(P, TRAIN)) > 0 then return true end
  if reason ~= 'staleness_window' then return false end
  for _, role in ipairs(trained_roles(P)) do
    if lag_of(P, role.policy, serving) > 0 then return true end
  end
  return false
end

-- lease: node, want, ttl, horizon, most leases the node may hold, most with which it gets fresh training tasks, share of evaluations on request in percent, session or '', age of a
-- lease in ms after which another node gets a copy of its task or '0', share of copies, then policy, version served.
-- Returns { reason, leases, of which copies have a sixth field, '1' when another node might get something }; reason is '' when all that was wanted was leased.
SIGNATURE.lease = { 'node', 'want', 'ttl', 'horizon', 'max_held', 'fresh', 'share', 'session', 'copy_after', 'copy_share', each = { 'policy', 'version' } }
function F.lease(keys, a)
  local P, node, want, ttl, horizon = keys[1], a.node, tonumber(a.want), tonumber(a.ttl), tonumber(a.horizon)
  local now, out, serving = now_ms(), {}, {}
  for _, item in ipairs(a.each) do serving[item.policy] = tonumber(item.version) end
  if run_of(P).state == 'finished' then return { 'run_finished', {}, '0' } end
  local f = call('HMGET', K.node(P, node), 'session', 'drain')
  if a.session ~= '' and f[1] ~= a.session then return { 'session_replaced', {}, '1' } end
  if f[2] then return { 'draining', {}, '1' } end
  local held = call('SCARD', K.node_leases(P, node))
  want = math.min(want, tonumber(a.max_held) - held)
  if want <= 0 then return { 'node_full', {}, '1' } end
  local quota = max_leases(P) - call('ZCARD', K.leases(P))
  if quota <= 0 then return { 'lease_quota', {}, '0' } end
  local reason = quota < want and 'lease_quota' or nil
  want = math.min(want, quota)
  lease_evaluations(P, node, serving, want, ttl, horizon, now, out, tonumber(a.share))
  local lacks = #out < want and lease_training(P, node, serving, want, tonumber(a.fresh) - held, ttl, horizon, now, out)
  if lacks then lease_evaluations(P, node, serving, want, ttl, horizon, now, out) end
  local after = tonumber(a.copy_after)
  if lacks and lacks ~= 'run_finished' and lacks ~= 'slow_node' and after > 0 then
    lease_copies(P, node, serving, want, after, tonumber(a.copy_share), ttl, now, out)
  end
  if #out < want then reason = lacks end
  if #out > 0 then call('HSET', K.node(P, node), 'leased_ms', now) end
  return { reason or '', out, is_more(P, serving, reason) and '1' or '0' }
end

local function holds(P, node, lease_id)
  local task, attempt = string.match(lease_id, '^(.*)#(%d+)$')
  if not task then return nil end
  local f = call('HMGET', K.task(P, task), 'state', 'attempt', 'node')
  if f[1] == 'leased' and f[2] == attempt and f[3] == node then return task end
  return nil
end

-- The task of which a node holds a copy under this lease id, or nil.
local function copied(P, node, lease_id)
  local task, attempt = string.match(lease_id, '^(.*)#(%d+)%-h$')
  if task and call('HGET', K.task(P, task), 'copy') == attempt .. ' ' .. node then return task end
  return nil
end

local function drop_copy(P, task, quiet_node, outcome)
  end_copy(P, task, call('HGET', K.task(P, task), 'copy'), 'lease_lost', quiet_node, outcome)
end

-- Extends a lease, or a copy, that is the node's; returns false when it is not.
local function extend(P, node, lease_id, until_ms)
  local task = holds(P, node, lease_id)
  local copy = not task and copied(P, node, lease_id)
  if not (task or copy) then return false end
  call('ZADD', task and K.leases(P) or K.copies(P), until_ms, task or copy)
  return true
end

-- Training tasks that a node without lag may be given now, whether or not they are there.
local function admitted_now(P)
  local credit = {}
  for _, policy in ipairs(policies(P)) do
    local f = call('HMGET', K.policy(P, policy), 'version', 'external')
    if not f[1] and f[2] ~= '1' then return 0 end
    credit[policy] = free_credit(P, policy, 0)
  end
  return math.max(0, math.min(admitted(P, trained_roles(P), credit), max_leases(P) - call('ZCARD', K.leases(P))))
end

-- A node that has finished nothing for longer is as good as any: it may have been slow for a while only.
local PACE_LIFE_MS = 600000

local MAX_DURATIONS = 256

-- Of the time that whole tasks take on a node the mean, for which the newest counts a fifth.
local function note_pace(P, f, n, node)
  if not n or f.node ~= node or f.attempt ~= '1' or not f.leased_ms then return end
  local took = now_ms() - tonumber(f.leased_ms)
  local mean = n.task_ms or took
  n.task_ms, n.done_ms = mean + (took - mean) / 5, now_ms()
  if run_of(P).copies ~= '1' then return end
  call('LPUSH', K.durations(P), took)
  call('LTRIM', K.durations(P), 0, MAX_DURATIONS - 1)
end

-- paces. Returns { training tasks that are leased, or could be }, then node, slots, ms of a task for each connected node that lately finished some.
-- Who has begun and finished nothing for longer than its tasks take is as slow as that: it hangs, or takes no more.
function F.paces(keys)
  local P, now = keys[1], now_ms()
  local found = { call('ZCARD', K.leases(P)) + math.min(queued(P), admitted_now(P)) }
  for _, node in ipairs(call('SMEMBERS', K.nodes(P))) do
    local f = call('HMGET', K.node(P, node), 'task_ms', 'connected_until', 'drain', 'done_ms', 'leased_ms', 'credits')
    if f[1] and tonumber(f[2] or 0) > now and not f[3] and now - tonumber(f[4]) < PACE_LIFE_MS then
      local quiet = now - math.max(tonumber(f[4]), tonumber(f[5] or 0))
      local slots = call('SCARD', K.node_leases(P, node)) + tonumber(f[6] or 0)
      for _, part in ipairs({ node, slots, precise(math.max(tonumber(f[1]), quiet)) }) do found[#found + 1] = part end
    end
  end
  return found
end

-- renew: node, ttl, lease ids. Returns the leases that are not this node's any more.
SIGNATURE.renew = { 'node', 'ttl', rest = true }
function F.renew(keys, a)
  local P, lost, now = keys[1], {}, now_ms()
  for _, id in ipairs(a.rest) do
    if not extend(P, a.node, id, now + tonumber(a.ttl)) then lost[#lost + 1] = id end
  end
  return lost
end

local function give_back_undelivered(P, task, now)
  give_back(P, task, 'undelivered', 'the lease did not reach the node', now)
end

-- reconcile: node, ttl, lease ids the node holds. Renews these, gives back what it does not hold. Returns { lost lease ids, given back }.
SIGNATURE.reconcile = { 'node', 'ttl', rest = true }
function F.reconcile(keys, a)
  local P, node, now, held, given, lost = keys[1], a.node, now_ms(), {}, 0, {}
  for _, id in ipairs(a.rest) do held[id] = true end
  for _, task in ipairs(call('SMEMBERS', K.node_leases(P, node))) do
    local id = task .. '#' .. call('HGET', K.task(P, task), 'attempt')
    if held[id] then
      call('ZADD', K.leases(P), now + tonumber(a.ttl), task)
      held[id] = nil
    else
      give_back_undelivered(P, task, now)
      given = given + 1
    end
  end
  for id in pairs(held) do
    if not extend(P, node, id, now + tonumber(a.ttl)) then lost[#lost + 1] = id end
  end
  return { lost, given }
end

-- leave: node, session, leases that it never confirmed. Gives these back. Returns how many.
SIGNATURE.leave = { 'node', 'session', rest = true }
function F.leave(keys, a)
  local P, node, now, given = keys[1], a.node, now_ms(), 0
  if call('HGET', K.node(P, node), 'session') == a.session then
    -- Leases come back in several calls; it leaves once.
    if tonumber(call('HGET', K.node(P, node), 'connected_until') or 0) > now then history.event(P, 'node_left', node) end
    call('HSET', K.node(P, node), 'connected_until', now)
  end
  for _, id in ipairs(a.rest) do
    local task = holds(P, node, id)
    local copy = not task and copied(P, node, id)
    if task then give_back_undelivered(P, task, now) elseif copy then drop_copy(P, copy, node, 'undelivered') end
    if task or copy then given = given + 1 end
  end
  return given
end

-- What a task is for, as failures and completions are counted: those of an evaluation do not hide those of training.
local function purpose_of(P, task)
  return call('HGET', K.task(P, task), 'evaluation') ~= '' and 'evaluation' or 'training'
end

-- A task, or a step (`steps:` and its policy), came to its end with all that it needs: failures after this one begin a new row.
local function note_completed(P, purpose)
  add(K.failures(P), 'completed ' .. purpose, 1)
end

-- Counts a failure under what it has in common with others (`kind`), and keeps the first of each kind. In a row are those
-- without a completed task of the same purpose between them. Returns whether it is the first.
local function note_failure(P, purpose, task, node, kind, reason, detail, now)
  local F, is_first = K.failures(P), false
  if call('HEXISTS', F, 'first ' .. kind) == 0 then
    is_first = true
    if call('HINCRBY', F, 'kinds', 1) > MAX.failure_kinds then kind = 'other' end
    call('HSETNX', F, 'first ' .. kind, table.concat({ now, node, task, reason, detail }, '\n'))
  end
  local row, completed = ' ' .. purpose .. ' ' .. kind, call('HGET', F, 'completed ' .. purpose) or '0'
  if call('HGET', F, 'after' .. row) ~= completed then call('HSET', F, 'after' .. row, completed, 'row' .. row, 0) end
  if kind ~= 'other' then call('HINCRBY', F, 'row' .. row, 1) end
  call('HINCRBY', F, 'count ' .. kind, 1)
  call('HSET', F, 'last ' .. kind, now)
  return is_first
end

-- fail: node, lease id, reason, detail, '1' retryable, '1' costs no attempt, backoff ms, kind. Returns 1 when it will be leased again.
SIGNATURE.fail = { 'node', 'lease', 'reason', 'detail', 'retryable', 'free', 'backoff', 'kind' }
function F.fail(keys, a)
  local P, node, now = keys[1], a.node, now_ms()
  local task = holds(P, node, a.lease)
  local copy = not task and copied(P, node, a.lease)
  if copy then drop_copy(P, copy, node, a.reason) end
  if not task then return 0 end
  local T = K.task(P, task)
  if a.free ~= '1' and note_failure(P, purpose_of(P, task), task, node, a.kind, a.reason, a.detail, now) then
    history.event(P, 'task_failed', node, a.reason .. ': ' .. a.detail)
  end
  if a.free == '1' then
    call('HINCRBY', T, 'tries', -1)
    if a.reason == 'missing_capability' then
      call('HSET', T, 'avoid', (call('HGET', T, 'avoid') or '\n') .. node .. '\n')
    end
    if a.reason == 'environment_unavailable' then
      call('HSET', K.node(P, node), 'environment_fault', a.detail, 'environment_fault_ms', now)
    end
  elseif a.retryable ~= '1' then
    bury(P, task, a.reason, a.detail, now)
    return 0
  end
  local again = give_again(P, task, a.reason, a.detail, now, now + tonumber(a.backoff), node)
  return again and 1 or 0
end

-- sweep: limit. Expires leases and groups whose time is over. Returns { expired leases, closed groups }.
SIGNATURE.sweep = { 'limit' }
function F.sweep(keys, a)
  local P, now, limit = keys[1], now_ms(), tonumber(a.limit)
  local expired = call('ZRANGEBYSCORE', K.leases(P), '-inf', now, 'LIMIT', 0, limit)
  for _, task in ipairs(expired) do give_again(P, task, 'lease_expired', 'not renewed in time', now, now, '') end
  write_gathered(P)
  for _, task in ipairs(call('ZRANGEBYSCORE', K.copies(P), '-inf', now, 'LIMIT', 0, limit)) do drop_copy(P, task, '', 'lease_expired') end
  local late = call('ZRANGEBYSCORE', K.open(P), '-inf', now, 'LIMIT', 0, limit)
  for _, task in ipairs(late) do close_task(P, task, 'expired', now) end
  if call('ZCOUNT', K.retry(P, TRAIN), '-inf', now) > 0 then emit(P, 'work') end
  return { #expired, #late }
end

-- close_training: limit. Closes admitted training tasks of a run that finishes. Returns how many were closed. Those of evaluations, which are few, are
-- passed over: it reads no more than these and what it closes.
SIGNATURE.close_training = { 'limit' }
function F.close_training(keys, a)
  local P, now, limit, closed, passed = keys[1], now_ms(), tonumber(a.limit), 0, 0
  while closed < limit do
    local open = call('ZRANGE', K.open(P), passed, passed + limit - closed - 1)
    if #open == 0 then break end
    for _, task in ipairs(open) do
      local is_training = call('HGET', K.task(P, task), 'evaluation') == ''
      if is_training then
        end_lease(P, task, 'run_finished', '', 'run_finished')
        if call('HGET', K.task(P, task), 'state') == 'leased' then call('HSET', K.task(P, task), 'state', 'retry') end
      end
      if is_training and close_task(P, task, 'run_finished', now) then closed = closed + 1 else passed = passed + 1 end
    end
  end
  return closed
end
