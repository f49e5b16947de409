-- Versions: announced once each, in order, by the current trainer epoch.

local function stored_version(text)
  local ms, sha, body = string.match(text, '^(%d+) (%S+) (.*)$')
  return ms, sha, body
end

-- Why the step may not publish this number, or nil. Step 0 is the initial version. A version that an older epoch wrote was announced before and
-- forgotten with the tail of Redis, perhaps together with the end of its step: it is in the store, so it is known again.
local function wrong_step(P, policy, step, writer, epoch, finished)
  if writer == epoch and step > finished then
    return refuse('INVALID', 'step ' .. step .. ' is not finished (last finished: ' .. finished .. '); ack it as trained before publishing')
  end
  local id = call('HGET', K.steps(P, policy), step)
  if writer == epoch and id and call('HGET', K.batch(P, id), 'stage') == 'skipped' then
    return refuse('INVALID', 'step ' .. step .. ' was skipped and publishes no version')
  end
  local earlier = call('HGET', K.version_steps(P, policy), step)
  if earlier then
    local version, by = string.match(earlier, '^(%d+) (%d+)$')
    if tonumber(by) == writer then
      return refuse('CONFLICT', 'step ' .. step .. ' already published version ' .. version .. ' in epoch ' .. by)
    end
  end
  return nil
end

local function from_the_future(step, writer, epoch)
  if writer <= epoch then return nil end
  return refuse('INVALID', 'step ' .. step .. ' was written under epoch ' .. writer .. ', newer than the caller (' .. epoch .. '); claim the policy again')
end

-- publish: policy, version, manifest sha256 (hex), step, caller's epoch, writer's epoch, '1' for a rollback, which belongs to no step, how
-- many numbers below it nobody can read, body. Returns { ms, body } of the announced version.
SIGNATURE.publish = { 'policy', 'version', 'sha', 'step', 'epoch', 'writer', 'rollback', 'unreadable', 'body' }
function F.publish(keys, a)
  local P, policy, Q = keys[1], a.policy, K.policy(keys[1], a.policy)
  local number, step, epoch, writer = tonumber(a.version), tonumber(a.step), tonumber(a.epoch), tonumber(a.writer)
  local refusal = fenced(P, policy, a.epoch)
  if refusal then return refusal end
  local known = call('HGET', K.versions(P, policy), a.version)
  if known then
    local ms, sha, body = stored_version(known)
    if sha == a.sha then return { ms, body } end
    return refuse('CONFLICT', 'version ' .. a.version .. ' of ' .. policy .. ' was announced with manifest ' .. sha ..
      '; publish other bytes under the next free number')
  end
  local next_number = tonumber(call('HGET', Q, 'version') or -1) + 1
  if number < next_number or number - tonumber(a.unreadable) > next_number then
    return refuse('GAP', 'version ' .. a.version .. ' of ' .. policy .. ' leaves a gap: the next number is ' .. next_number ..
      '; announce the versions before it first', 'newest_version=' .. next_number - 1)
  end
  local finished = tonumber(call('HGET', Q, 'finished'))
  if tonumber(a.unreadable) > finished + LOST_CLAIMS then
    return refuse('INVALID', a.unreadable .. ' versions before ' .. a.version .. ' of ' .. policy .. ' are said to be unreadable, but it has finished ' ..
      finished .. ' steps; count those that the log of the store has')
  end
  local back = a.rollback == '1'
  local wrong = from_the_future(step, writer, epoch) or not back and wrong_step(P, policy, step, writer, epoch, finished)
  if wrong then return wrong end
  local ms = now_ms()
  call('HSET', K.versions(P, policy), a.version, ms .. ' ' .. a.sha .. ' ' .. a.body)
  if not back then call('HSET', K.version_steps(P, policy), a.step, a.version .. ' ' .. a.writer) end
  call('HSET', Q, 'version', a.version, 'publish_ms', ms)
  -- Finished steps whose weights a rollback gives up will publish none: their groups must not hold credit for ever.
  local over = back and finished or math.min(step, finished)
  for _, bound in ipairs(call('HKEYS', K.unpublished(P, policy))) do
    if tonumber(bound) <= over then call('HDEL', K.unpublished(P, policy), bound) end
  end
  emit(P, 'version ' .. policy)
  emit(P, 'work')
  return { tostring(ms), a.body }
end

-- announce_snapshot: policy, version, manifest sha256 (hex), body. The next draw of a policy that is a snapshot of another; no trainer has it.
-- Returns 1, or 0 when another server announced it.
SIGNATURE.announce_snapshot = { 'policy', 'version', 'sha', 'body' }
function F.announce_snapshot(keys, a)
  local P, Q = keys[1], K.policy(keys[1], a.policy)
  if tonumber(a.version) ~= tonumber(call('HGET', Q, 'version') or -1) + 1 then return 0 end
  local ms = now_ms()
  call('HSET', K.versions(P, a.policy), a.version, ms .. ' ' .. a.sha .. ' ' .. a.body)
  call('HSET', Q, 'version', a.version, 'publish_ms', ms)
  emit(P, 'version ' .. a.policy)
  emit(P, 'work')
  return 1
end

local FIRST_RATING, ELO_K = 1000, 16

-- rate: snapshot policy, then per episode: version that it played, score of the trained policy in [0, 1]. Elo; a version starts with the rating
-- that the trained policy has when they first meet. Returns 1.
SIGNATURE.rate = { 'policy', each = { 'version', 'score' } }
function F.rate(keys, a)
  local R = K.ratings(keys[1], a.policy)
  for _, item in ipairs(a.each) do
    local f = call('HMGET', R, 'trained', item.version)
    local own = tonumber(f[1] or FIRST_RATING)
    local other = tonumber(f[2] or own)
    local gain = ELO_K * (tonumber(item.score) - 1 / (1 + 10 ^ ((other - own) / 400)))
    call('HSET', R, 'trained', precise(own + gain), item.version, precise(other - gain))
    call('HINCRBY', R, 'episodes trained', 1)
    call('HINCRBY', R, 'episodes ' .. item.version, 1)
  end
  return 1
end
