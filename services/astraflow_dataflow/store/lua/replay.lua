-- Replay: groups that were trained on and may be trained on again. They stay stored while they may be replayed, and while a retained step has them;
-- the fields `steps` and `uses` of a group count those steps and how often it was replayed. First uses alone are in the account of trajectories.

local REPLAY_PER_CALL = 64

-- What a policy replays, or nil. `replay` of a policy is: groups of a step, groups kept, largest staleness, uses of a group, order.
local function replay_of(P, policy)
  local n, kept, staleness, uses, order = string.match(call('HGET', K.policy(P, policy), 'replay') or '', '^(%d+) (%d+) (%d+) (%d+) (%l+)$')
  return n and { n = tonumber(n), kept = tonumber(kept), staleness = tonumber(staleness), uses = tonumber(uses), order = order }
end

-- Frees a group that no retained step has any more and that is not to be replayed; returns its trajectories.
local function free_replayed(P, policy, gid)
  local f = call('HMGET', K.group(P, gid), 'steps', 'trained_step', 'trained_batch')
  if tonumber(f[1]) > 0 or call('ZSCORE', K.replay(P, policy), gid) then return 0 end
  return retire_group(P, gid, 'trained', f[2], f[3])
end

local function leave_replay(P, policy, gid)
  call('ZREM', K.replay(P, policy), gid)
  call('ZREM', K.replay_versions(P, policy), gid)
  return free_replayed(P, policy, gid)
end

local function enter_replay(P, policy, gid)
  local f = call('HMGET', K.group(P, gid), 'replay_score', 'oldest')
  call('ZADD', K.replay(P, policy), f[1], gid)
  call('ZADD', K.replay_versions(P, policy), f[2], gid)
end

-- A step trained on a group for the first time. `priority` is what counts where the order is by priority.
local function keep_for_replay(P, policy, gid, step, id, priority)
  local R = replay_of(P, policy)
  if not R then return end
  local score = R.order == 'priority' and priority or call('HINCRBY', K.policy(P, policy), 'replayable', 1)
  call('HSET', K.group(P, gid), 'steps', 1, 'uses', 0, 'replay_score', score, 'trained_step', step, 'trained_batch', id)
  enter_replay(P, policy, gid)
  if call('ZCARD', K.replay(P, policy)) > R.kept then leave_replay(P, policy, call('ZRANGE', K.replay(P, policy), 0, 0)[1]) end
end

-- Takes the groups that a step replays; returns lines of group and use. What is too stale goes.
local function take_replayed(P, policy, base)
  local R, taken = replay_of(P, policy), {}
  if not R then return taken end
  local oldest = base - R.staleness
  for _, gid in ipairs(call('ZRANGEBYSCORE', K.replay_versions(P, policy), '-inf', '(' .. oldest, 'LIMIT', 0, REPLAY_PER_CALL)) do
    leave_replay(P, policy, gid)
  end
  local drawn = R.order == 'uniform' and call('ZRANDMEMBER', K.replay(P, policy), R.n) or call('ZREVRANGE', K.replay(P, policy), 0, R.n - 1)
  for _, gid in ipairs(drawn) do
    if tonumber(call('ZSCORE', K.replay_versions(P, policy), gid)) >= oldest then
      local use = call('HINCRBY', K.group(P, gid), 'uses', 1)
      call('HINCRBY', K.group(P, gid), 'steps', 1)
      if use >= R.uses then leave_replay(P, policy, gid) end
      taken[#taken + 1] = gid .. ' ' .. use
    end
  end
  return taken
end

-- A batch that was not trained on gives back what it would have replayed.
local function return_replayed(P, policy, id)
  for _, line in ipairs(split(call('HGET', K.batch(P, id), 'replayed'))) do
    local gid = string.match(line, '^%S+')
    call('HINCRBY', K.group(P, gid), 'uses', -1)
    call('HINCRBY', K.group(P, gid), 'steps', -1)
    enter_replay(P, policy, gid)
  end
end

-- A retained step goes; returns the trajectories of its groups that nothing else has.
local function release_groups(P, policy, step, id)
  local released, f = 0, call('HMGET', K.batch(P, id), 'groups', 'replayed', 'stage')
  local function released_one(gid)
    call('HINCRBY', K.group(P, gid), 'steps', -1)
    return free_replayed(P, policy, gid)
  end
  for _, gid in ipairs(split(f[1])) do
    local is_kept = call('HEXISTS', K.group(P, gid), 'steps') == 1
    released = released + (is_kept and released_one(gid) or retire_group(P, gid, f[3], step, id))
  end
  for _, line in ipairs(split(f[2])) do released = released + released_one(string.match(line, '^%S+')) end
  return released
end

-- Whether a run that takes no more steps still keeps groups for replay.
local function has_replay_left(P, policy)
  return run_of(P).state ~= 'active' and call('EXISTS', K.replay(P, policy)) == 1
end

local function end_replay(P, policy)
  local released = 0
  if not has_replay_left(P, policy) then return released end
  for _, gid in ipairs(call('ZRANGE', K.replay(P, policy), 0, REPLAY_PER_CALL - 1)) do released = released + leave_replay(P, policy, gid) end
  return released
end
