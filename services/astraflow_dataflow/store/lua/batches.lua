-- Batches: bound to (policy, step) until acked or given back. Every call carries the trainer epoch.

-- Claims that a Redis may have lost with its last moments; those that one may lack which was emptied, or restored from a backup.
local LOST_CLAIMS, LACKING_CLAIMS = 64, 1048576

-- A trainer holds its policy from its claim on, until it releases it or has not called for a lease time.
local function note_heard(P, policy)
  call('HSET', K.policy(P, policy), 'heard_ms', now_ms())
end

local function fenced(P, policy, epoch)
  local f = call('HMGET', K.policy(P, policy), 'epoch', 'trainer')
  local current = f[1]
  if not current then return refuse('NOTFOUND', 'no policy ' .. policy .. ' in this run') end
  if tonumber(epoch) ~= tonumber(current) then
    local why = tonumber(epoch) > tonumber(current) and 'Redis lost the claim: claim the policy again'
      or 'that trainer claimed the policy: stop, or claim it again'
    return refuse('FENCED', 'trainer epoch ' .. epoch .. ' of ' .. policy .. ' is not the current one (' .. current .. ', of trainer ' ..
      (f[2] or 'none yet') .. '); ' .. why, 'newest_epoch=' .. current)
  end
  return nil
end

-- Why there is no batch for a step: an operator took it away, or nobody acquired it.
local function unbound(P, policy, step)
  local f = call('HMGET', K.policy(P, policy), 'voided_step', 'voided', 'voided_batch')
  if f[1] == step then
    return refuse('PRECONDITION', 'the batch of step ' .. step .. ' of ' .. policy .. ' was voided (' .. f[2] .. '); acquire the step again',
      'voided=' .. f[3])
  end
  return refuse('NOTFOUND', 'no batch is bound to step ' .. step .. ' of ' .. policy .. '; acquire it first')
end

local function held_by_another(P, policy, claimer, lease_ms)
  local f, now = call('HMGET', K.policy(P, policy), 'trainer', 'claim_ms', 'heard_ms'), now_ms()
  if not f[3] or f[1] == claimer or tonumber(f[3]) + lease_ms <= now then return nil end
  local function ago(ms) return math.floor((now - tonumber(ms)) / 1000) .. ' s' end
  return refuse('HELD', policy .. ' is held by trainer ' .. f[1] .. ', which claimed it ' .. ago(f[2]) .. ' ago and last called ' .. ago(f[3]) ..
    ' ago; stop that trainer (one that was killed holds it for ' .. math.floor(lease_ms / 1000) .. ' s after its last call), or claim it ' ..
    'anyway, which fences that trainer', 'holder=' .. f[1])
end

local function return_groups(P, policy, gids, n, reason)
  for _, gid in ipairs(gids) do
    call('ZADD', K.ready(P, policy), call('HGET', K.group(P, gid), 'score'), gid)
    note_group(P, gid, 'R', reason)
  end
  count(P, 'in_batch', -n)
  count(P, 'ready', n)
  emit(P, 'ready ' .. policy)
  emit(P, 'work')
  return #gids
end

local function unbind(P, policy, step, id)
  return_replayed(P, policy, id)
  call('HDEL', K.steps(P, policy), step)
  call('HDEL', K.unpublished(P, policy), step)
  call('ZREM', K.batch_leases(P), id)
end

-- A policy's field `ahead` is the step whose batch was read ahead: bound while the step before was in hand, and not acquired since for itself. The
-- batch goes back when that step did not end as was reckoned with, or is to have other groups.
local function give_back_ahead(P, policy)
  local step = call('HGET', K.policy(P, policy), 'ahead')
  if not step then return end
  local id = call('HGET', K.steps(P, policy), step)
  local f = call('HMGET', K.batch(P, id), 'groups', 'n')
  return_groups(P, policy, split(f[1]), tonumber(f[2]), 'read_ahead')
  unbind(P, policy, step, id)
  call('UNLINK', K.batch(P, id))
  call('HDEL', K.policy(P, policy), 'ahead')
end

-- The plug-ins that were asked for last hold from now on, if they do not yet: no step is in hand, or one has just ended. Of those that were asked
-- for since the last time only the newest do. They choose every batch that is not in hand.
local function switch_plugins(P)
  local f = call('HMGET', K.run(P), 'switches', 'switch')
  if not f[1] or f[1] == f[2] then return end
  local steps = {}
  for _, policy in ipairs(policies(P)) do
    give_back_ahead(P, policy)
    steps[#steps + 1] = policy .. ' ' .. call('HGET', K.policy(P, policy), 'finished')
  end
  call('HSET', K.switch(P, f[1]), 'effect_ms', now_ms(), 'steps', lines(steps))
  history.event(P, 'plugins_switched', '', call('HGET', K.switch(P, f[1]), 'changes'))
  call('HSET', K.run(P), 'switch', f[1], 'archive', call('HGET', K.switch(P, f[1]), 'archive'))
  emit(P, 'run')
end

-- A batch is taken back, of the step in hand or of the one that was read ahead; the latter goes with the former, whose step is bound anew.
local function take_back(P, policy, step, id)
  unbind(P, policy, step, id)
  if call('HGET', K.policy(P, policy), 'ahead') == step then
    call('HDEL', K.policy(P, policy), 'ahead')
    return
  end
  give_back_ahead(P, policy)
  switch_plugins(P)
end

-- Drops the trajectories of a batch that nobody may train on as `reason`, for `detail` if there is one; returns how many.
local function discard(P, id, reason, detail)
  local f = call('HMGET', K.batch(P, id), 'groups', 'n', 'step')
  for _, gid in ipairs(split(f[1])) do
    note_group(P, gid, 'D', reason, detail)
    retire_group(P, gid, reason, f[3], id)
  end
  count(P, 'in_batch', -tonumber(f[2]))
  count(P, 'dropped:' .. reason, tonumber(f[2]))
  emit(P, 'work')
  return tonumber(f[2])
end

-- Why nobody may accept a loss of this policy, or nil. Its trainer has said what it doubts, and Redis was emptied, restored or restarted since the
-- last batch was acquired: whoever acquires one agrees with what is here. What was accepted before may be repeated.
local function nothing_lost(P, policy, identity, step)
  local f = call('HMGET', K.policy(P, policy), 'finished', 'doubt', 'unproven')
  if step <= tonumber(f[1]) and call('HGET', K.run(P), 'identity') == identity then return nil end
  local why = not f[3] and 'a trainer went on from what this Redis has since it was started; restart a Redis that was restored'
    or not f[2] and 'no trainer doubts what this Redis has; say why when the policy is released (ReleasePolicy.doubt), then claim it again'
  return why and refuse('PRECONDITION', 'no loss of ' .. policy .. ' can be accepted, its last finished step stays ' .. f[1] .. ': ' .. why)
end

-- What was lost is given up: the policy goes on after `step`, which a checkpoint covers. A batch that is bound up to there was trained on.
local function accept_loss(P, policy, identity, step)
  local Q = K.policy(P, policy)
  local f = call('HMGET', Q, 'finished', 'durable')
  local finished = tonumber(f[1])
  call('HSET', K.run(P), 'identity', identity)
  if step <= finished then return end
  local steps = call('HKEYS', K.steps(P, policy))
  -- The newest first: what goes with a step before it would return.
  table.sort(steps, function(one, other) return tonumber(one) > tonumber(other) end)
  for _, bound in ipairs(steps) do
    local id = call('HGET', K.steps(P, policy), bound)
    if id and tonumber(bound) > finished and tonumber(bound) <= step then
      discard(P, id, 'voided')
      take_back(P, policy, bound, id)
      call('UNLINK', K.batch(P, id))
    end
  end
  call('HSET', Q, 'finished', step, 'durable', math.max(step, tonumber(f[2])))
end

-- claim: policy, trainer, an epoch to be above, the epoch the trainer holds or 0, data incarnation, lease ms, '1' to claim only what nobody holds
-- and to hold nothing, the last step it will take or 0, identity and step of an accepted loss or ''. Returns { epoch, last finished step, last
-- durable step, newest version or '', identity of the run }.
SIGNATURE.claim = { 'policy', 'trainer', 'known_epoch', 'held_epoch', 'incarnation', 'lease_ms', 'only_if_unheld', 'last_step', 'lost_identity', 'lost_step' }
function F.claim(keys, a)
  local P, Q = keys[1], K.policy(keys[1], a.policy)
  if call('EXISTS', Q) == 0 then return refuse('NOTFOUND', 'no policy ' .. a.policy .. ' in this run') end
  local f = call('HMGET', Q, 'epoch', 'trainer', 'incarnation')
  local current, held = tonumber(f[1]), tonumber(a.held_epoch)
  -- A claim of the same trainer that is newer than what it holds is one whose answer it did not get.
  if held > 0 and current > held and f[2] ~= a.trainer then return fenced(P, a.policy, held) end
  -- What was given out, here or by the store to who took over without a server, and what this Redis may lack of it: nobody raises it beyond.
  local seen, most = math.max(tonumber(a.known_epoch), held), current + (f[3] == a.incarnation and LOST_CLAIMS or LACKING_CLAIMS)
  if seen > most then
    return refuse('INVALID', 'epoch ' .. precise(seen) .. ' of ' .. a.policy .. ' was never given out: the newest is ' .. current ..
      ', and at most ' .. most - current .. ' more may be missing here; give the newest epoch of the manifests in the store')
  end
  local only_if_unheld = a.only_if_unheld == '1'
  local refusal = only_if_unheld and held_by_another(P, a.policy, a.trainer, tonumber(a.lease_ms))
  if a.lost_identity ~= '' then refusal = refusal or nothing_lost(P, a.policy, a.lost_identity, tonumber(a.lost_step)) end
  if refusal then return refusal end
  -- Another incarnation may have lost claims: skip more numbers than can have been given in the lost moments, so none is given twice.
  local skipped = f[3] and f[3] ~= a.incarnation and LOST_CLAIMS or 0
  local epoch = math.max(current + skipped, seen) + 1
  call('HSET', Q, 'epoch', epoch, 'trainer', a.trainer, 'claim_ms', now_ms(), 'incarnation', a.incarnation)
  if f[3] ~= a.incarnation then call('HSET', Q, 'unproven', 1) end
  if only_if_unheld then
    call('HDEL', Q, 'heard_ms')
  else
    call('HDEL', Q, 'doubt', 'last_step')
    if tonumber(a.last_step) > 0 then call('HSET', Q, 'last_step', a.last_step) end
    note_heard(P, a.policy)
  end
  emit(P, 'due')
  history.event(P, 'trainer_claimed', a.policy, 'trainer ' .. a.trainer .. ', epoch ' .. epoch)
  if a.lost_identity ~= '' then accept_loss(P, a.policy, a.lost_identity, tonumber(a.lost_step)) end
  f = call('HMGET', Q, 'finished', 'durable', 'version')
  return { epoch, tonumber(f[1]), tonumber(f[2]), f[3] or '', call('HGET', K.run(P), 'identity') or '' }
end

-- hold: policy, epoch or 0, lease ms, then what the trainer says that it waits for: reason, detail, progress, each or ''. The trainer of the epoch
-- lives, whatever it is busy with; one without an epoch is only listened to, and only while nobody holds the policy. Returns 1.
SIGNATURE.hold = { 'policy', 'epoch', 'lease_ms', 'reason', 'detail', 'progress' }
function F.hold(keys, a)
  local P, Q = keys[1], K.policy(keys[1], a.policy)
  if call('EXISTS', Q) == 0 then return refuse('NOTFOUND', 'no policy ' .. a.policy .. ' in this run') end
  local has_claimed, refusal = tonumber(a.epoch) > 0, nil
  if has_claimed then refusal = fenced(P, a.policy, a.epoch) else refusal = held_by_another(P, a.policy, nil, tonumber(a.lease_ms)) end
  if refusal then return refusal end
  if has_claimed then note_heard(P, a.policy) end
  if call('HGET', Q, 'reported') ~= a.reason then call('HSET', Q, 'reported', a.reason, 'reported_since', now_ms()) end
  call('HSET', Q, 'reported_detail', a.detail, 'reported_progress', a.progress, 'reported_ms', now_ms())
  return 1
end

-- release_policy: policy, epoch, why its trainer does not trust what is here or ''. The trainer ends: nobody holds the policy. Returns 1.
SIGNATURE.release_policy = { 'policy', 'epoch', 'doubt' }
function F.release_policy(keys, a)
  local refusal = fenced(keys[1], a.policy, a.epoch)
  if refusal then return refusal end
  call('HDEL', K.policy(keys[1], a.policy), 'heard_ms')
  if a.doubt ~= '' then call('HSET', K.policy(keys[1], a.policy), 'doubt', a.doubt) end
  history.event(keys[1], 'trainer_left', a.policy, a.doubt)
  emit(keys[1], 'due')
  return 1
end

-- A block of its own: Lua has room for 200 local names outside.
do

-- Drops groups that would be too old for a step starting from `base`; at most `limit`. Returns true when there may be more.
local function drop_stale(P, policy, base, limit)
  local bound = base - tonumber(call('HGET', K.policy(P, policy), 'max_staleness'))
  if bound <= 0 then return false end
  local old = call('ZRANGEBYSCORE', K.ready(P, policy), '-inf', '(' .. precise(bound * 4294967296), 'LIMIT', 0, limit)
  for _, gid in ipairs(old) do
    local n = tonumber(call('HGET', K.group(P, gid), 'n'))
    call('ZREM', K.ready(P, policy), gid)
    count(P, 'ready', -n)
    count(P, 'dropped:stale', n)
    note_group(P, gid, 'D', 'stale')
    retire_group(P, gid, 'stale')
  end
  if #old > 0 then emit(P, 'work') end
  return #old == limit
end

-- Waits of trainers; `for_groups` are those that nodes could end. A table, for a library may have 200 locals.
local trainer_wait = { for_groups = { ready_groups = true, batch_needs = true, selector = true } }

-- It is over: `waited` are the ms that a policy's trainers waited for groups.
function trainer_wait.ended(P, policy, now)
  local Q = K.policy(P, policy)
  local f = call('HMGET', Q, 'wait', 'wait_since', 'wait_until')
  if trainer_wait.for_groups[f[1]] then call('HINCRBY', Q, 'waited', math.max(0, math.min(now, tonumber(f[3])) - tonumber(f[2]))) end
  call('HDEL', Q, 'wait', 'wait_since', 'wait_until')
end

function trainer_wait.note(P, policy, reason, wait_ms)
  local Q, now = K.policy(P, policy), now_ms()
  local f = call('HMGET', Q, 'wait', 'wait_until')
  if f[1] ~= reason or tonumber(f[2] or 0) < now then
    trainer_wait.ended(P, policy, now)
    call('HSET', Q, 'wait', reason, 'wait_since', now)
  end
  -- A trainer that polls again within the grace is still the same wait.
  call('HSET', Q, 'wait_until', now + wait_ms + 2000)
end

-- The lowest score of a group that a step starting from `base` may have.
local function oldest_for(P, policy, base)
  local oldest = base - tonumber(call('HGET', K.policy(P, policy), 'max_staleness'))
  return oldest > 0 and precise(oldest * 4294967296) or '-inf'
end

-- Takes `wanted` groups out of the ready set: those a selector chose, or the ones whose deadline is nearest from the score `oldest` on.
local function take(P, policy, wanted, chosen, oldest)
  local gids = #chosen > 0 and chosen or call('ZRANGEBYSCORE', K.ready(P, policy), oldest, '+inf', 'LIMIT', 0, wanted)
  call_many({ 'ZREM', K.ready(P, policy) }, gids)
  return gids
end

local function bind(P, policy, step, base, gids, lease_ms)
  local id = policy .. '-' .. step .. '-' .. call('HINCRBY', K.run(P), 'batches', 1)
  local n = 0
  for _, gid in ipairs(gids) do
    n = n + tonumber(call('HGET', K.group(P, gid), 'n'))
    note_group(P, gid, 'B', id, step)
  end
  call('HSET', K.batch(P, id), 'policy', policy, 'step', step, 'base', base, 'groups', lines(gids), 'n', n, 'stage', '',
    'replayed', lines(take_replayed(P, policy, base)))
  call('HSET', K.steps(P, policy), step, id)
  call('HSET', K.unpublished(P, policy), step, #gids)
  call('ZADD', K.batch_leases(P), now_ms() + lease_ms, id)
  trainer_wait.ended(P, policy, now_ms())
  call('HDEL', K.policy(P, policy), 'lack', 'lack_since', 'voided_step', 'voided', 'voided_batch')
  count(P, 'ready', -n)
  count(P, 'in_batch', n)
  emit(P, 'due')
  -- Nodes may go on with the next batch.
  if (call('HGET', K.policy(P, policy), 'barrier') or 'none') ~= 'none' then emit(P, 'work') end
  return id
end

-- Whether other groups of a policy are sampled, or may be leased yet.
local function more_come(P, policy)
  if call('SCARD', K.outstanding(P, policy)) > 0 then return 1 end
  local is_over = free_credit(P, policy, 0) == 0 or queued(P) == 0 and call('HGET', K.run(P), 'exhausted') == '1'
  return is_over and 0 or 1
end

-- The ready groups a batch is chosen from, nearest deadline first from the score `oldest` on. What is read ahead never has to do with what there is.
local function offer(P, a, limit, oldest)
  local policy, is_ahead = a.policy, a.ahead == '1'
  local lacked = is_ahead and 0 or now_ms() - tonumber(call('HGET', K.policy(P, policy), 'lack_since') or now_ms())
  local out = { 'offer', call('SCARD', K.outstanding(P, policy)), is_ahead and 1 or more_come(P, policy), lacked }
  local ready = call('ZRANGEBYSCORE', K.ready(P, policy), oldest, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #ready, 2 do out[#out + 1] = { ready[i], ready[i + 1], call('HGET', K.group(P, ready[i]), 'items') } end
  return out
end

-- Whether the chosen groups can be bound: `wanted` different ones, all of them ready.
local function all_ready(P, policy, wanted, chosen)
  local seen, n = {}, 0
  for _, gid in ipairs(chosen) do
    if seen[gid] or not call('ZSCORE', K.ready(P, policy), gid) then return false end
    seen[gid], n = true, n + 1
  end
  return n == wanted
end

-- A step waits for this; one that is read ahead holds nobody up.
local function waits(P, a, reason, text)
  if a.ahead ~= '1' then trainer_wait.note(P, a.policy, reason, tonumber(a.wait_ms)) end
  return { 'wait', reason, text }
end

-- What a selector, or what the batch needs, makes of a step that could be bound: a reply when there is nothing to bind yet, nil when the choice can
-- be. How long it lacks something is kept apart from the wait, which ends while the trainer does not ask.
local function selected(P, a, wanted, oldest)
  if not a.mode then return nil end
  if a.mode == 'offer' then return offer(P, a, math.max(tonumber(a.offered), wanted), oldest) end
  if a.mode == 'wait' then return waits(P, a, 'selector', 'the selector wants other groups than those that are ready') end
  if a.mode == 'lack' then
    if a.ahead ~= '1' then
      call('HSETNX', K.policy(P, a.policy), 'lack_since', now_ms())
      call('HSET', K.policy(P, a.policy), 'lack', a.lack)
    end
    return waits(P, a, 'batch_needs', a.lack)
  end
  return not all_ready(P, a.policy, wanted, a.rest) and { 'more' } or nil
end

-- Groups of all policies that nodes sample or will sample again.
local function still_sampled(P)
  local n = 0
  for _, policy in ipairs(policies(P)) do n = n + call('SCARD', K.outstanding(P, policy)) end
  return n
end

-- Binds the groups of a step, from the score `oldest` on, or says what it waits for.
local function bind_ready(P, a, base, oldest, wanted)
  local ready = call('ZCOUNT', K.ready(P, a.policy), oldest, '+inf')
  if ready < wanted then return waits(P, a, 'ready_groups', ready .. ' of ' .. wanted .. ' groups are ready') end
  local instead = selected(P, a, wanted, oldest)
  if instead then return instead end
  return { 'bound', bind(P, a.policy, tonumber(a.step), base, take(P, a.policy, wanted, a.rest, oldest), tonumber(a.lease_ms)), '' }
end

local function behind_publishing(P, a, base, newest, most)
  if base <= newest + most then return nil end
  return waits(P, a, 'publish', 'base version ' .. base .. ', newest published ' .. newest .. ', at most ' .. a.max_behind .. ' behind')
end

-- The batch of the step after the one in hand, for the version that this one makes. Groups that would be too old for it stay where they are: the
-- step in hand may yet be skipped. Synchronous runs read nothing ahead.
local function read_ahead(P, a, finished, newest, wanted, barrier)
  local Q, step = K.policy(P, a.policy), tonumber(a.step)
  local in_hand = call('HGET', K.steps(P, a.policy), precise(step - 1))
  local is_next = step == finished + 2 and in_hand and not call('HGET', Q, 'ahead')
  local is_synchronous = (barrier or 'none') ~= 'none' or tonumber(run_of(P).alternate or 0) > 0
  if not is_next or is_synchronous or run_of(P).state ~= 'active' then
    return { 'wait', 'not_ahead', 'the step before has to end first' }
  end
  local base = math.max(tonumber(a.base), tonumber(call('HGET', K.batch(P, in_hand), 'base')) + 1)
  local behind = behind_publishing(P, a, base, newest, tonumber(a.max_behind) + 1)
  if behind then return behind end
  local reply = bind_ready(P, a, base, oldest_for(P, a.policy, base), wanted)
  if reply[1] == 'bound' then call('HSET', Q, 'ahead', a.step) end
  return reply
end

-- Whether this step is the last one that may have a ready group which is due before another of its batch: it came after that was read ahead.
local function has_missed(P, policy, base, id)
  local oldest, latest = base - tonumber(call('HGET', K.policy(P, policy), 'max_staleness')), 0
  for _, gid in ipairs(split(call('HGET', K.batch(P, id), 'groups'))) do
    latest = math.max(latest, tonumber(call('HGET', K.group(P, gid), 'score')))
  end
  local due = math.min(latest, (oldest + 1) * 4294967296)
  return oldest >= 0 and call('ZCOUNT', K.ready(P, policy), precise(oldest * 4294967296), '(' .. precise(due)) > 0
end

-- The step begins whose batch was read ahead: it has that one, if it is what the step would get now. Returns nil when it went back.
local function take_up_ahead(P, a, base, id)
  if base ~= tonumber(call('HGET', K.batch(P, id), 'base')) or has_missed(P, a.policy, base, id) then
    give_back_ahead(P, a.policy)
    return nil
  end
  trainer_wait.ended(P, a.policy, now_ms())
  call('HDEL', K.policy(P, a.policy), 'ahead')
  call('ZADD', K.batch_leases(P), 'XX', now_ms() + tonumber(a.lease_ms), id)
  return { 'bound', id, '' }
end

-- acquire: policy, epoch, step, base version, most versions unpublished, stale groups per call, lease ms, wait ms, '1' to read the step after the one
-- in hand ahead; to choose groups also 'offer', 'wait', 'lack' or 'take', most groups offered, what is lacking, groups to take. Returns { 'bound',
-- batch, stage } | { 'wait', reason, figures } | { 'more' } | { 'offer', outstanding groups, 1 when others come, ms that the batch has lacked
-- something, { group, score, items }... }.
SIGNATURE.acquire = { 'policy', 'epoch', 'step', 'base', 'max_behind', 'stale_limit', 'lease_ms', 'wait_ms', 'ahead', 'mode', 'offered', 'lack', rest = true }
function F.acquire(keys, a)
  local P, policy, step, base = keys[1], a.policy, tonumber(a.step), tonumber(a.base)
  local refusal = fenced(P, policy, a.epoch)
  if refusal then return refusal end
  local f = call('HMGET', K.policy(P, policy), 'finished', 'durable', 'version', 'groups_per_step', 'barrier', 'ahead', 'unproven')
  if f[7] then call('HDEL', K.policy(P, policy), 'unproven') end
  local finished, newest, wanted, id = tonumber(f[1]), tonumber(f[3] or -1), tonumber(f[4]), call('HGET', K.steps(P, policy), a.step)
  if id and (f[6] ~= a.step or a.ahead == '1') then
    note_heard(P, policy)
    call('ZADD', K.batch_leases(P), 'XX', now_ms() + tonumber(a.lease_ms), id)
    return { 'bound', id, call('HGET', K.batch(P, id), 'stage') }
  end
  if step <= finished then
    return refuse('NOTFOUND', 'step ' .. step .. ' is not retained: steps up to ' .. f[2] .. ' are durable; resume from there')
  end
  if a.ahead == '1' then return read_ahead(P, a, finished, newest, wanted, f[5]) end
  if step ~= finished + 1 then
    return refuse('INVALID', 'step ' .. step .. ' cannot be bound: the last finished step is ' .. finished .. ', ask for ' .. finished + 1)
  end
  note_heard(P, policy)
  if run_of(P).state ~= 'active' then
    give_back_ahead(P, policy)
    return { 'wait', 'run_finished', 'the run takes no more steps' }
  end
  local whose, last = turn(P)
  if whose and whose ~= policy then return waits(P, a, 'turn', 'it is the turn of ' .. whose .. ', until its step ' .. last .. ' is finished') end
  local behind = behind_publishing(P, a, base, newest, tonumber(a.max_behind))
  if behind then return behind end
  local taken_up = id and take_up_ahead(P, a, base, id)
  if taken_up then return taken_up end
  if drop_stale(P, policy, base, tonumber(a.stale_limit)) then return { 'more' } end
  local sampled = f[5] == 'phase' and still_sampled(P) or 0
  if sampled > 0 and call('ZCARD', K.ready(P, policy)) >= wanted then return waits(P, a, 'barrier', sampled .. ' groups are still sampled') end
  return bind_ready(P, a, base, '-inf', wanted)
end

end

-- batch: policy, epoch, step. Read only. Returns { id, base, manifest or '' }, then when there is no manifest yet the items of its groups, and
-- { use, items } of those that it replays.
SIGNATURE.batch = { 'policy', 'epoch', 'step' }
function F.batch(keys, a)
  local P, policy = keys[1], a.policy
  local refusal = fenced(P, policy, a.epoch)
  if refusal then return refusal end
  local id = call('HGET', K.steps(P, policy), a.step)
  if not id then return unbound(P, policy, a.step) end
  local f = call('HMGET', K.batch(P, id), 'base', 'manifest', 'groups', 'replayed')
  local out = { id, f[1], f[2] or '' }
  if not f[2] then
    for _, gid in ipairs(split(f[3])) do out[#out + 1] = call('HGET', K.group(P, gid), 'items') end
    for _, line in ipairs(split(f[4])) do
      local gid, use = string.match(line, '^(%S+) (%d+)$')
      out[#out + 1] = { tonumber(use), call('HGET', K.group(P, gid), 'items') }
    end
  end
  return out
end

-- seal: policy, batch, manifest, digest, then staleness, trajectories. Keeps the first manifest; a repetition changes nothing.
SIGNATURE.seal = { 'policy', 'batch', 'manifest', 'digest', each = { 'age', 'trajectories' } }
function F.seal(keys, a)
  local P, B = keys[1], K.batch(keys[1], a.batch)
  if call('EXISTS', B) == 0 or call('HSETNX', B, 'manifest', a.manifest) == 0 then return 0 end
  call('HSET', B, 'digest', a.digest)
  for _, item in ipairs(a.each) do call('HINCRBY', K.staleness(P, a.policy), item.age, item.trajectories) end
  return 1
end

local STAGE_ORDER = { [''] = 0, intent = 1, trained = 2, skipped = 2 }

local function end_step(P, policy, step, id, stage, n, priorities)
  local trained, priority_of = stage == 'trained', {}
  for _, item in ipairs(priorities) do priority_of[item.gid] = item.priority end
  for _, gid in ipairs(split(call('HGET', K.batch(P, id), 'groups'))) do
    note_group(P, gid, 'A', stage)
    if trained then keep_for_replay(P, policy, gid, step, id, priority_of[gid] or 0) end
  end
  count(P, 'in_batch', -n)
  count(P, trained and 'trained' or 'dropped:skipped', n)
  call('HSET', K.policy(P, policy), 'finished', step, 'finish_ms', now_ms(), 'failed_batches', 0)
  note_completed(P, 'steps:' .. policy)
  call('ZREM', K.batch_leases(P), id)
  switch_plugins(P)
  if not trained then
    call('HDEL', K.unpublished(P, policy), step)
    give_back_ahead(P, policy)
  end
  local takes_turns = turn(P)
  if not trained or takes_turns then emit(P, 'work') end
  -- The trainer whose turn begins waits for a batch.
  if takes_turns then emit(P, 'run') end
end

-- ack: policy, epoch, step, batch, digest, stage, names (lines) and values (binary32) of its figures, then priority of each group where they are replayed by it. Stages only move forward. Returns the
-- stage recorded now.
SIGNATURE.ack = { 'policy', 'epoch', 'step', 'batch', 'digest', 'stage', 'names', 'values', each = { 'gid', 'priority' } }
function F.ack(keys, a)
  local P, policy, B = keys[1], a.policy, K.batch(keys[1], a.batch)
  local refusal = fenced(P, policy, a.epoch)
  if refusal then return refusal end
  local voided = call('HMGET', B, 'stage', 'reason')
  if voided[1] == 'voided' then
    return refuse('PRECONDITION', 'batch ' .. a.batch .. ' was voided (' .. voided[2] .. '); forget what it did and acquire step ' .. a.step ..
      ' again', 'voided=' .. a.batch)
  end
  if call('HGET', K.steps(P, policy), a.step) ~= a.batch then
    return refuse('NOTFOUND', 'batch ' .. a.batch .. ' is not bound to step ' .. a.step .. ' of ' .. policy .. '; acquire the step again')
  end
  local f = call('HMGET', B, 'stage', 'digest', 'n')
  if f[2] ~= a.digest then
    return refuse('CONFLICT', 'the digest is not that of batch ' .. a.batch .. '; fetch the batch again and train on what was handed out')
  end
  if call('HGET', K.policy(P, policy), 'ahead') == a.step then
    return refuse('PRECONDITION', 'batch ' .. a.batch .. ' was read ahead; once the step before is TRAINED or SKIPPED, acquire step ' .. a.step ..
      ' for itself, then record what is done with it', 'lacks=step_before')
  end
  local now_order, next_order = STAGE_ORDER[f[1]], STAGE_ORDER[a.stage]
  if now_order == 2 and next_order == 2 and f[1] ~= a.stage then
    return refuse('CONFLICT', 'step ' .. a.step .. ' is already ' .. f[1] .. ' and cannot become ' .. a.stage)
  end
  if next_order <= now_order then return f[1] end
  if a.stage == 'trained' and now_order == 0 then
    return refuse('PRECONDITION', 'step ' .. a.step .. ' has no intent; record BATCH_STAGE_INTENT before training on its batch',
      'lacks=intent')
  end
  call('HSET', B, 'stage', a.stage, 'epoch', a.epoch)
  if next_order == 2 then
    end_step(P, policy, a.step, a.batch, a.stage, tonumber(f[3]), a.each)
    call('XADD', K.consumed(P, policy), '*', 'step', a.step, 'batch', a.batch, 'stage', a.stage, 'epoch', a.epoch, 'digest', a.digest, 'n', f[3],
      'replayed', call('HGET', B, 'replayed'))
    history.step(P, policy, a.step, a.names, a.values)
  end
  return a.stage
end

-- nack: policy, epoch, step, batch or '' for whichever is bound, why its groups are quarantined or '' where they return to the ready set with their
-- old scores, then of a quarantine what is said, and what that has in common with others. Returns { groups returned, trajectories dropped, batches in
-- a row whose steps failed }.
SIGNATURE.nack = { 'policy', 'epoch', 'step', 'batch', 'quarantine', 'detail', 'kind' }
function F.nack(keys, a)
  local P, policy = keys[1], a.policy
  local refusal = fenced(P, policy, a.epoch)
  if refusal then return refusal end
  local id, failed = call('HGET', K.steps(P, policy), a.step), tonumber(call('HGET', K.policy(P, policy), 'failed_batches') or 0)
  if not id or (a.batch ~= '' and a.batch ~= id) then return { 0, 0, failed } end
  local f = call('HMGET', K.batch(P, id), 'stage', 'groups', 'n')
  if STAGE_ORDER[f[1]] == 2 then
    return refuse('PRECONDITION', 'step ' .. a.step .. ' is ' .. f[1] .. '; only a batch that was not trained on can be given back')
  end
  local returned, dropped = 0, 0
  if a.quarantine == '' then
    returned = return_groups(P, policy, split(f[2]), tonumber(f[3]), 'nacked')
  else
    dropped = discard(P, id, 'quarantined', a.quarantine)
    local detail = 'policy ' .. policy .. ', batch ' .. id .. ': ' .. a.detail
    note_failure(P, 'steps:' .. policy, '', '', a.kind, a.quarantine, detail, now_ms())
    history.event(P, 'batch_quarantined', policy, a.quarantine .. ': ' .. detail)
    if a.quarantine == 'step_failed' then failed = call('HINCRBY', K.policy(P, policy), 'failed_batches', 1) end
  end
  take_back(P, policy, a.step, id)
  call('UNLINK', K.batch(P, id))
  return { returned, dropped, failed }
end

-- void: policy, step, batch, 'return' or 'discard', reason. Whatever the epoch. Returns { groups returned, trajectories dropped }.
SIGNATURE.void = { 'policy', 'step', 'batch', 'action', 'reason' }
function F.void(keys, a)
  local P, policy, B = keys[1], a.policy, K.batch(keys[1], a.batch)
  local f = call('HMGET', B, 'stage', 'groups', 'n', 'returned', 'dropped')
  if f[1] == 'voided' then return { tonumber(f[4]), tonumber(f[5]) } end
  if call('HGET', K.steps(P, policy), a.step) ~= a.batch then
    return refuse('NOTFOUND', 'batch ' .. a.batch .. ' is not bound to step ' .. a.step .. ' of ' .. policy .. '; Status and why show what is')
  end
  if STAGE_ORDER[f[1]] == 2 then
    return refuse('PRECONDITION', 'step ' .. a.step .. ' is ' .. f[1] .. '; only a batch that was not trained on can be voided')
  end
  local returned, dropped = 0, 0
  if a.action == 'return' then
    returned = return_groups(P, policy, split(f[2]), tonumber(f[3]), 'voided')
  else
    dropped = discard(P, a.batch, 'voided')
  end
  take_back(P, policy, a.step, a.batch)
  history.event(P, 'batch_voided', policy, 'step ' .. a.step .. ': ' .. a.reason)
  call('HSET', K.policy(P, policy), 'voided_step', a.step, 'voided', a.reason, 'voided_batch', a.batch)
  -- Stays for a while, so that its trainer learns of it and a repeated call gets the same answer.
  call('HDEL', B, 'groups', 'manifest', 'digest')
  call('HSET', B, 'stage', 'voided', 'reason', a.reason, 'returned', returned, 'dropped', dropped)
  call('PEXPIRE', B, 86400000)
  return { returned, dropped }
end

-- renew_batch: policy, epoch, step, lease ms. Returns 1 when a batch is bound.
SIGNATURE.renew_batch = { 'policy', 'epoch', 'step', 'lease_ms' }
function F.renew_batch(keys, a)
  local P = keys[1]
  local refusal = fenced(P, a.policy, a.epoch)
  if refusal then return refusal end
  local id = call('HGET', K.steps(P, a.policy), a.step)
  if not id then return unbound(P, a.policy, a.step) end
  note_heard(P, a.policy)
  call('ZADD', K.batch_leases(P), 'XX', now_ms() + tonumber(a.lease_ms), id)
  return 1
end

-- Whether every trained policy has a trainer that named its last step, and a checkpoint that covers it.
local function all_done(P)
  for _, policy in ipairs(policies(P)) do
    local f = call('HMGET', K.policy(P, policy), 'frozen', 'last_step', 'durable')
    if f[1] ~= '1' and (tonumber(f[2] or 0) < 1 or tonumber(f[3]) < tonumber(f[2])) then return false end
  end
  return true
end

-- mark_durable: policy, epoch, step. Never moves back. Ends the training of a run when it was the last that was missing. Returns the newest
-- durable step.
SIGNATURE.mark_durable = { 'policy', 'epoch', 'step' }
function F.mark_durable(keys, a)
  local P, policy, Q = keys[1], a.policy, K.policy(keys[1], a.policy)
  local refusal = fenced(P, policy, a.epoch)
  if refusal then return refusal end
  local f = call('HMGET', Q, 'durable', 'finished')
  if tonumber(a.step) > tonumber(f[2]) then
    return refuse('INVALID', 'step ' .. a.step .. ' cannot be durable: the last finished step is ' .. f[2])
  end
  local durable = math.max(tonumber(f[1]), tonumber(a.step))
  call('HSET', Q, 'durable', durable)
  emit(P, 'due')
  if all_done(P) and run_of(P).state == 'active' then
    set_state(P, 'finishing')
    emit(P, 'run')
    emit(P, 'work')
  end
  return durable
end

-- releasable: policy. Returns retained steps that a durable checkpoint covers, and 0 for what is kept for replay when no step follows.
SIGNATURE.releasable = { 'policy' }
function F.releasable(keys, a)
  local P, policy = keys[1], a.policy
  local durable, steps = tonumber(call('HGET', K.policy(P, policy), 'durable')), {}
  for _, step in ipairs(call('HKEYS', K.steps(P, policy))) do
    if tonumber(step) <= durable then steps[#steps + 1] = step end
  end
  if has_replay_left(P, policy) then steps[#steps + 1] = '0' end
  return steps
end

-- release: policy, step. Frees one durable step, or with step 0 some of what was kept for replay. Returns the number of trajectories released.
SIGNATURE.release = { 'policy', 'step' }
function F.release(keys, a)
  local P, policy = keys[1], a.policy
  if a.step == '0' then return end_replay(P, policy) end
  local id = call('HGET', K.steps(P, policy), a.step)
  if not id or tonumber(a.step) > tonumber(call('HGET', K.policy(P, policy), 'durable')) then return 0 end
  local released = release_groups(P, policy, a.step, id)
  call('UNLINK', K.batch(P, id))
  call('HDEL', K.steps(P, policy), a.step)
  return released
end

-- pending. Returns { run state, tasks that are open or unsettled, batches whose lease is over (an alarm, nothing is unbound), ms until the next one
-- is or '' }: what only time changes.
function F.pending(keys)
  local P, now = keys[1], now_ms()
  local late = call('ZRANGEBYSCORE', K.batch_leases(P), '-inf', now, 'LIMIT', 0, 100)
  local due = call('ZRANGEBYSCORE', K.batch_leases(P), '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local num_open = call('ZCARD', K.open(P)) + call('ZCARD', K.settling(P))
  return { run_of(P).state, num_open, late, due[2] and tonumber(due[2]) - now or '' }
end
