-- Where payloads are. The place of one is `episode`: it is a key of its own here; or `episode pack offset size`: it is outside, so many bytes of
-- that pack. A pack is what one commit stored; nothing is written to it again. It is named in `packs_ending`, with the time at which it ends, before
-- it is written; a commit that needs it moves it to `packs`, with the number of payloads that are still needed, and the last of them moves it back.
-- A server that takes what ended away names it in `packs_ended` first: no commit can refer to it any more, so nothing that is needed is ever removed.

local PACKS = {}

-- Whoever read where a payload is has so long to read it.
local PACK_GRACE_MS = 60000

function PACKS.outside(place)
  return string.match(place, '^(%S+) (%S+) (%d+) (%d+)$')
end

function PACKS.episode_of(place)
  return string.match(place, '^%S+')
end

function PACKS.end_pack(P, pack)
  call('HDEL', K.packs(P), pack)
  call('ZADD', K.packs_ending(P), now_ms() + PACK_GRACE_MS, pack)
end

-- So many more payloads of a pack are needed.
function PACKS.hold(P, pack, n)
  call('ZREM', K.packs_ending(P), pack)
  call('HINCRBY', K.packs(P), pack, n)
end

-- A payload is not needed any more.
function PACKS.discard(P, place, id)
  local _, pack = PACKS.outside(place)
  if not pack then return call('UNLINK', K.payload(P, place, id)) end
  if pack == CALL.pack then
    CALL.held = CALL.held - 1
  elseif call('HINCRBY', K.packs(P), pack, -1) <= 0 then
    PACKS.end_pack(P, pack)
  end
end

function PACKS.size_of(P, place, id)
  local _, _, _, size = PACKS.outside(place)
  return tonumber(size) or call('STRLEN', K.payload(P, place, id))
end

function PACKS.is_kept(P, pack)
  return call('HEXISTS', K.packs(P), pack) == 1 or call('ZSCORE', K.packs_ending(P), pack)
end

-- The commit at hand stored its payloads outside, in this pack.
function PACKS.begin(P, pack)
  CALL.pack, CALL.has_pack, CALL.held = pack, PACKS.is_kept(P, pack), 0
end

-- Of a payload that the present commit stored: whether it is there; that it is needed, which returns whether it is there; and that it is not.
function PACKS.is_stored(P, place, id)
  if CALL.pack then return CALL.has_pack end
  return call('EXISTS', K.payload(P, place, id)) == 1
end

function PACKS.keep(P, place, id)
  if not CALL.pack then
    -- One that was there before may be what a failed commit left, and end.
    if not CALL.wrote_all then call('PERSIST', K.payload(P, place, id)) end
    return CALL.wrote_all or call('EXISTS', K.payload(P, place, id)) == 1
  end
  if CALL.has_pack then CALL.held = CALL.held + 1 end
  return CALL.has_pack
end

function PACKS.forgo(P, place, id)
  if not CALL.pack then call('UNLINK', K.payload(P, place, id)) end
end

-- The commit is over: of its pack so much is needed.
function PACKS.hold_rest(P)
  if CALL.has_pack and CALL.held > 0 then
    PACKS.hold(P, CALL.pack, CALL.held)
  elseif CALL.has_pack then
    PACKS.end_pack(P, CALL.pack)
  end
  CALL.pack = nil
end

-- Payload and ownership of trajectories that nothing will read again.
local function forget(P, ids)
  local known, payloads = {}, {}
  for i, place in ipairs(call_many({ 'HMGET', K.owners(P) }, ids)) do
    if place then known[#known + 1] = ids[i] end
    if place and PACKS.outside(place) then
      PACKS.discard(P, place, ids[i])
    elseif place then
      payloads[#payloads + 1] = K.payload(P, place, ids[i])
    end
  end
  call_many({ 'UNLINK' }, payloads)
  call_many({ 'HDEL', K.owners(P) }, known)
end

-- begin_pack: name, time ms that a commit has. Returns 1.
SIGNATURE.begin_pack = { 'pack', 'horizon' }
function F.begin_pack(keys, a)
  call('ZADD', K.packs_ending(keys[1]), now_ms() + tonumber(a.horizon), a.pack)
  return 1
end

-- end_packs: limit. Returns packs that nothing refers to, or ever will: they are to be removed, then named to `packs_removed`.
SIGNATURE.end_packs = { 'limit' }
function F.end_packs(keys, a)
  local P = keys[1]
  for _, pack in ipairs(call('ZRANGEBYSCORE', K.packs_ending(P), '-inf', now_ms(), 'LIMIT', 0, a.limit)) do
    call('ZREM', K.packs_ending(P), pack)
    call('SADD', K.packs_ended(P), pack)
  end
  return call('SRANDMEMBER', K.packs_ended(P), a.limit)
end

-- packs_removed: packs. Returns 1.
SIGNATURE.packs_removed = { rest = true }
function F.packs_removed(keys, a)
  call_many({ 'SREM', K.packs_ended(keys[1]) }, a.rest)
  return 1
end

-- replace_payloads: trajectory, its place, where it was stored again. What was lost outside is replaced by what a node pushed once more; nothing that
-- moved meanwhile. Returns how many were replaced.
SIGNATURE.replace_payloads = { each = { 'id', 'was', 'place' } }
function F.replace_payloads(keys, a)
  local P, n = keys[1], 0
  for _, item in ipairs(a.each) do
    local _, pack = PACKS.outside(item.place)
    if call('HGET', K.owners(P), item.id) == item.was and PACKS.is_kept(P, pack) then
      PACKS.hold(P, pack, 1)
      PACKS.discard(P, item.was, item.id)
      call('HSET', K.owners(P), item.id, item.place)
      n = n + 1
    end
  end
  return n
end
