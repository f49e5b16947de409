-- What every function of the library uses: time, counters, events, ends of trajectories.
-- P is the run's key prefix; ids and slugs are strings; times are milliseconds of Redis' own clock.

-- `redis.call` does not exist yet while the library is loaded; the first call finds it, and all others go there straight.
local call
call = function(...)
  call = redis.call
  return call(...)
end
local GROUP = 'raas'
local TRAIN = 'train'
-- One table, for Lua has room for 200 local names in the whole library. `given_back`: leases of one node that a call gives to others, as many as a
-- sweep ends, for Redis does nothing else meanwhile.
local MAX = { events = 10000, dead = 10000, failure_kinds = 32, poison = 1000, given_back = 64, nodes = 4096, forgotten = 256, joining_ms = 15000 }
-- So many accepted episodes of a node make up for one that is poison.
local ACCEPTED_PER_POISON = 20
-- How long a task waits for a node that plays all of its roles before one gets it that plays some.
local RELUCTANCE_MS = 2000
-- Life of a payload whose commit failed.
local UNCOMMITTED_S = 3600

-- What one call of a function reads, or adds up, once; `begin` makes a new one. Redis runs one function at a time.
local CALL

local function begin()
  CALL = { sums = {}, gathered = {}, emitted = {}, lost = {} }
end

local function now_ms()
  if not CALL.now then
    local t = call('TIME')
    CALL.now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
    CALL.now_text = string.format('%.0f', CALL.now)
  end
  return CALL.now
end

-- The same as text: a number is printed anew wherever it meets a string.
local function now_text()
  now_ms()
  return CALL.now_text
end

-- `metadata` is `name=value`; it travels with the error.
local function refuse(kind, text, metadata)
  return redis.error_reply(kind .. ' ' .. (metadata and '[' .. metadata .. '] ' or '') .. text)
end

-- Something that a recount counts is elsewhere now, so one that is under way begins again.
local function move()
  CALL.moved = true
end

-- Adds to a field of a hash when the call ends, all that was added at once; nothing reads the field before.
local function add(key, field, by)
  CALL.sums[key] = CALL.sums[key] or {}
  CALL.sums[key][field] = (CALL.sums[key][field] or 0) + by
end

local function count(P, field, by)
  move()
  add(K.counters(P), field, by)
end

-- Lua hands over 8,000 values at most; even, for those that go in pairs.
local MOST_VALUES = 4000

-- A command of many values, in parts where they are too many. Returns all replies, or the elements of those that are lists.
local function call_many(head, values)
  local replies = {}
  if #head == 2 and #values > 0 and #values <= MOST_VALUES then
    local reply = call(head[1], head[2], unpack(values))
    return type(reply) == 'table' and reply or { reply }
  end
  for first = 1, #values, MOST_VALUES do
    local part = { unpack(head) }
    for i = first, math.min(first + MOST_VALUES - 1, #values) do part[#part + 1] = values[i] end
    local reply = call(unpack(part))
    for _, one in ipairs(type(reply) == 'table' and reply or { reply }) do replies[#replies + 1] = one end
  end
  return replies
end

-- Adds values to a command that takes many, of this key: it is sent when the call ends, once for all. Nothing reads before what it changes.
local gather, gather_all
do

local function gathered(command, key)
  local of_command = CALL.gathered[command]
  if not of_command then
    of_command = {}
    CALL.gathered[command] = of_command
  end
  local all = of_command[key]
  if not all then
    all = { head = command == 'XACK' and { command, key, GROUP } or { command, key } }
    of_command[key] = all
    table.insert(CALL.gathered, all)
  end
  return all
end

function gather(command, key, value, second)
  local all = gathered(command, key)
  all[#all + 1] = value
  if second then all[#all + 1] = second end
end

function gather_all(command, key, values)
  local all = gathered(command, key)
  for _, value in ipairs(values) do all[#all + 1] = value end
end

end

-- Something happened to `subject`, a node, a policy or the run, that people see in its timeline.
local history = {}
function history.event(P, kind, subject, detail)
  call('XADD', K.history(P), 'MAXLEN', '~', 2000, '*', 'kind', kind, 'subject', subject, 'detail', string.sub(detail or '', 1, 500))
end

local write_gathered
do

local function write_sums(key, sums)
  local fields, written = {}, {}
  for field, by in pairs(sums) do
    if by ~= 0 then fields[#fields + 1] = field end
  end
  if #fields == 1 then call('HINCRBY', key, fields[1], sums[fields[1]]) end
  if #fields < 2 then return end
  for i, value in ipairs(call('HMGET', key, unpack(fields))) do
    written[#written + 1] = fields[i]
    written[#written + 1] = string.format('%.0f', tonumber(value or 0) + sums[fields[i]])
  end
  call('HSET', key, unpack(written))
end

function write_gathered(P)
  local topics = table.concat(CALL.emitted, '\n')
  CALL.emitted = {}
  if topics ~= '' then call('XADD', K.events(P), 'MAXLEN', '~', MAX.events, '*', 'topic', topics) end
  for _, told in ipairs(CALL.lost) do
    call('XADD', K.events(P), 'MAXLEN', '~', MAX.events, '*', 'topic', 'node ' .. told.node, 'leases', table.concat(told, '\n'), 'reason', told.reason)
    if told.reason == 'lease_expired' then history.event(P, 'leases_lost', told.node, #told .. ' not renewed in time') end
  end
  CALL.lost = {}
  if CALL.moved then add(K.counters(P), 'moved', 1) end
  local sums, gathered = CALL.sums, CALL.gathered
  CALL.sums, CALL.gathered, CALL.moved = {}, {}, false
  for key, added in pairs(sums) do write_sums(key, added) end
  for _, values in ipairs(gathered) do call_many(values.head, values) end
end

end

-- Calls a function: what it counted is written also when it fails, for what it moved until then stays moved.
local function once(callback, keys, a)
  local ok, reply = pcall(callback, keys, a)
  write_gathered(keys[1])
  if not ok then error(reply, 0) end
  return reply
end

-- Topics: `work` (there may be tasks to lease), `ready <policy>`, `run`, `version <policy>`, `node <id>`, and `due`: something began that only time
-- ends, or that a sweep ends. An event without fields says no more when a call repeats it;
-- all of them are one entry when the call ends.
local function emit(P, topic, ...)
  if select('#', ...) > 0 then return call('XADD', K.events(P), 'MAXLEN', '~', MAX.events, '*', 'topic', topic, ...) end
  if CALL.emitted[topic] then return end
  CALL.emitted[topic] = true
  CALL.emitted[#CALL.emitted + 1] = topic
end

-- Tells a node that it lost a lease: one event for all that it lost in this call for the same reason.
local function tell_lost(node, lease, reason)
  local name = node .. ' ' .. reason
  if not CALL.lost[name] then
    CALL.lost[name] = { node = node, reason = reason }
    table.insert(CALL.lost, CALL.lost[name])
  end
  table.insert(CALL.lost[name], lease)
end

local RUN_FIELDS = { 'state', 'max_attempts', 'max_poison', 'max_leases', 'copies', 'admit', 'alternate', 'priorities', 'roles', 'switch', 'arrivals',
  'position' }

-- What is read of the run in almost every call.
local function run_of(P)
  if not CALL.run then
    CALL.run = {}
    for i, value in ipairs(call('HMGET', K.run(P), unpack(RUN_FIELDS))) do CALL.run[RUN_FIELDS[i]] = value end
  end
  return CALL.run
end

local function set_state(P, state)
  call('HSET', K.run(P), 'state', state)
  run_of(P).state = state
  history.event(P, 'run_state', '', state)
end

local function lines(list)
  return table.concat(list, '\n')
end

local function split(text)
  local list = {}
  for line in string.gmatch(text or '', '[^\n]+') do list[#list + 1] = line end
  return list
end

-- The lanes of training tasks, the most urgent first: those of priorities that were ever submitted, and that of priority 0. All share one set of
-- tasks to be tried again.
local function training_lanes(P)
  local lanes = {}
  for priority in string.gmatch(run_of(P).priorities or '', '%d') do lanes[#lanes + 1] = TRAIN .. ':' .. priority end
  lanes[#lanes + 1] = TRAIN
  return lanes
end

local function retries(P, lane)
  return K.retry(P, string.match(lane, '^(' .. TRAIN .. '):%d$') or lane)
end

-- Training tasks that nobody has leased yet.
local function queued(P)
  local n = 0
  for _, lane in ipairs(training_lanes(P)) do n = n + call('XLEN', K.lane(P, lane)) - call('XPENDING', K.lane(P, lane), GROUP)[1] end
  return n
end

local function precise(number)
  return string.format('%.17g', number)
end

local function is_open(state)
  return state == 'queued' or state == 'leased' or state == 'retry'
end

-- The names of each function's arguments, in the order in which they are sent. What follows them is records with the fields `each`, or values
-- (`rest`). A record that has an `each` itself is followed by as many of those as its field `n` says. Sent by position and read by name: names on
-- the wire, as pairs, cost the server 5.2 us instead of 3.3 to pack a commit. What is sent most has a function that reads it: `read`.
local SIGNATURE = {}
-- The functions themselves: Lua has room for 200 local names.
local F = {}

local by_name
-- A block of its own, as Lua has room for 200 local names outside.
do

-- The record that begins at `at`, and where the next one does.
local function record(names, values, at)
  local item = {}
  for i, name in ipairs(names) do item[name] = values[at + i - 1] end
  at = at + #names
  if names.each then
    item.each = {}
    for i = 1, tonumber(item.n) do item.each[i], at = record(names.each, values, at) end
  end
  return item, at
end

function by_name(names, values)
  if not names then return values end
  if names.read then return names.read(values) end
  local a, at = {}, #names + 1
  for i, name in ipairs(names) do a[name] = values[i] end
  if names.each then
    a.each = {}
    while at <= #values do a.each[#a.each + 1], at = record(names.each, values, at) end
  elseif names.rest then
    a.rest = {}
    for i = at, #values do a.rest[#a.rest + 1] = values[i] end
  end
  return a
end

end

local function named(callback, names)
  return function(keys, values)
    begin()
    return once(callback, keys, by_name(names, values))
  end
end

-- Wraps a function so that it finds no run that does not exist or is being deleted: nothing may write its keys again.
-- `names.without_run` is called then: it removes what was written in the same pipeline.
local function of_a_run(callback, names)
  return function(keys, values)
    begin()
    local state = run_of(keys[1]).state
    if not state or state == 'deleting' then
      if names and names.without_run then names.without_run(keys[1], by_name(names, values)) end
      return refuse('NOTFOUND', 'no run ' .. string.match(keys[1], '{(.*)}') .. ' on this server; create it, or list the runs it has')
    end
    return once(callback, keys, by_name(names, values))
  end
end

-- Position of the newest commit of the run; `moved` makes the next one.
local function position(P, moved)
  if moved then return call('HINCRBY', K.run(P), 'position', 1) end
  return tonumber(run_of(P).position or 0)
end

local function policies(P)
  CALL.policies = CALL.policies or call('LRANGE', K.policies(P), 0, -1)
  return CALL.policies
end

-- Whose turn it is to train, and the step that ends the turn; nil where all policies train at once, or have no steps left. It is the first, by
-- name, of those with the fewest whole turns behind them, so it follows from the finished steps alone.
local function turn(P)
  local every = tonumber(run_of(P).alternate or 0)
  if every == 0 then return nil end
  local whose, last, fewest
  for _, policy in ipairs(policies(P)) do
    local f = call('HMGET', K.policy(P, policy), 'frozen', 'finished', 'steps')
    local turns = math.floor(tonumber(f[2]) / every)
    if f[1] ~= '1' and tonumber(f[2]) < tonumber(f[3]) and (not fewest or turns < fewest) then
      whose, last, fewest = policy, math.min((turns + 1) * every, tonumber(f[3])), turns
    end
  end
  return whose, last
end

-- Trained roles in recipe order, as { name, policy }.
local function trained_roles(P)
  if CALL.roles then return CALL.roles end
  local roles = {}
  CALL.roles = roles
  for _, line in ipairs(split(run_of(P).roles)) do
    local name, policy = string.match(line, '^(%S+) (%S+)$')
    roles[#roles + 1] = { name = name, policy = policy }
  end
  return roles
end
