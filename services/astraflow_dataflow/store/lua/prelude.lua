-- What every function of the library uses: time, counters, events, ends of trajectories.
-- P is the run's key prefix; ids and slugs are strings; times are milliseconds of Redis' own clock.

-- `redis.call` does not exist yet while the library is loaded.
local function call(...) return redis.call(...) end
local GROUP = 'raas'
local TRAIN = 'train'
local MAX_EVENTS = 10000
local MAX_DEAD = 10000
local MAX_FAILURE_KINDS = 32
local MAX_POISON = 1000
-- How long a task waits for a node that plays all of its roles before one gets it that plays some.
local RELUCTANCE_MS = 2000

local function now_ms()
  local t = call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- `metadata` is `name=value`; it travels with the error.
local function refuse(kind, text, metadata)
  return redis.error_reply(kind .. ' ' .. (metadata and '[' .. metadata .. '] ' or '') .. text)
end

local function count(P, field, by)
  if by ~= 0 then call('HINCRBY', K.counters(P), field, by) end
end

local function emit(P, topic, ...)
  call('XADD', K.events(P), 'MAXLEN', '~', MAX_EVENTS, '*', 'topic', topic, ...)
end

local function lines(list)
  return table.concat(list, '\n')
end

local function split(text)
  local list = {}
  for line in string.gmatch(text or '', '[^\n]+') do list[#list + 1] = line end
  return list
end

local function precise(number)
  return string.format('%.17g', number)
end

-- Payload and ownership of trajectories that nothing will read again.
local function forget(P, ids)
  for _, id in ipairs(ids) do
    local episode = call('HGET', K.owners(P), id)
    if episode then
      call('UNLINK', K.payload(P, episode, id))
      call('HDEL', K.owners(P), id)
    end
  end
end

local function is_open(state)
  return state == 'queued' or state == 'leased' or state == 'retry'
end

-- The names of each function's arguments, in the order in which they are sent. What follows them is records with the fields `each`, or values
-- (`rest`). Sent by position and read by name: that costs Redis nothing measurable (37 and 44 us of CPU per commit, with and without), while
-- names on the wire, as pairs, cost the server 5.2 us instead of 3.3 to pack a commit.
local SIGNATURE = {}

local function by_name(names, values)
  if not names then return values end
  local a = {}
  for i, name in ipairs(names) do a[name] = values[i] end
  if names.each then
    a.each = {}
    for i = #names + 1, #values, #names.each do
      local item = {}
      for j, field in ipairs(names.each) do item[field] = values[i + j - 1] end
      a.each[#a.each + 1] = item
    end
  elseif names.rest then
    a.rest = {}
    for i = #names + 1, #values do a.rest[#a.rest + 1] = values[i] end
  end
  return a
end

local function named(callback, names)
  return function(keys, values) return callback(keys, by_name(names, values)) end
end

-- Wraps a function so that it finds no run that does not exist or is being deleted: nothing may write its keys again.
-- `names.without_run` is called then: it removes what was written in the same pipeline.
local function of_a_run(callback, names)
  return function(keys, values)
    local state = call('HGET', K.run(keys[1]), 'state')
    if not state or state == 'deleting' then
      if names and names.without_run then names.without_run(keys[1], by_name(names, values)) end
      return refuse('NOTFOUND', 'no run ' .. string.match(keys[1], '{(.*)}') .. ' on this server; create it, or list the runs it has')
    end
    return callback(keys, by_name(names, values))
  end
end

-- Position of the newest commit of the run; `moved` makes the next one.
local function position(P, moved)
  if moved then return call('HINCRBY', K.run(P), 'position', 1) end
  return tonumber(call('HGET', K.run(P), 'position') or 0)
end

local function policies(P)
  return call('LRANGE', K.policies(P), 0, -1)
end

-- Whose turn it is to train, and the step that ends the turn; nil where all policies train at once, or have no steps left. It is the first, by
-- name, of those with the fewest whole turns behind them, so it follows from the finished steps alone.
local function turn(P)
  local every = tonumber(call('HGET', K.run(P), 'alternate') or 0)
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
  local roles = {}
  for _, line in ipairs(split(call('HGET', K.run(P), 'roles'))) do
    local name, policy = string.match(line, '^(%S+) (%S+)$')
    roles[#roles + 1] = { name = name, policy = policy }
  end
  return roles
end
