-- The archive: trajectories whose part in the run is over, kept until a server has written them to the run's store. They are entries of one
-- stream, which is bounded in bytes: what does not fit costs the oldest. What the recipe does not archive is forgotten at once.

-- More than this are never given up at a time: a call stays short, and the next one goes on.
local MAX_GIVEN_UP = 64

-- Whether the recipe archives what ends for this reason; then also the most bytes that may wait. `archive` of a run is the share of its tasks,
-- that many bytes, and reasons; `dropped` stands for all but `trained`. Groups of a task stay together: its id decides about the share.
local function archived(P, task, reason)
  local share, most, reasons = string.match(call('HGET', K.run(P), 'archive') or '', '^(%S+) (%S+) (.+)$')
  if not share then return nil end
  local function named(name) return string.find(' ' .. reasons .. ' ', ' ' .. name .. ' ', 1, true) end
  if not (named(reason) or reason ~= 'trained' and named('dropped')) then return nil end
  if tonumber(string.sub(redis.sha1hex(task), 1, 8), 16) >= tonumber(share) * 4294967296 then return nil end
  return tonumber(most)
end

-- Removes an entry and its payloads, whose places are its `episodes`; returns its trajectories and bytes.
local function leave_archive(P, entry)
  local f = {}
  for i = 1, #entry[2], 2 do f[entry[2][i]] = entry[2][i + 1] end
  local episodes = split(f.episodes)
  for i, id in ipairs(split(f.ids)) do PACKS.discard(P, episodes[i], id) end
  call('XDEL', K.archive_entries(P), entry[1])
  call('HINCRBY', K.archive(P), 'bytes', -tonumber(f.bytes))
  call('HINCRBY', K.archive(P), 'waiting', -#episodes)
  return #episodes, tonumber(f.bytes)
end

-- Adds an entry, and gives up the oldest ones that nobody is writing until the rest is within the bound.
local function enter_archive(P, most, bytes, n, ...)
  local A, entries = K.archive(P), K.archive_entries(P)
  call('XADD', entries, '*', 'bytes', bytes, ...)
  call('HINCRBY', A, 'waiting', n)
  local waiting = call('HINCRBY', A, 'bytes', bytes)
  local sealed = call('HGET', A, 'sealed')
  for _ = 1, MAX_GIVEN_UP do
    local oldest = waiting > most and call('XRANGE', entries, sealed and '(' .. sealed or '-', '+', 'COUNT', 1)
    if not oldest or not oldest[1] then return end
    local given_up, freed = leave_archive(P, oldest[1])
    waiting = waiting - freed
    call('HINCRBY', A, 'given_up', given_up)
    call('HSET', A, 'given_up_ms', now_ms())
  end
end

-- retire: the trajectories `ids` of one group leave the run for `reason`; `items` is what a batch says of them. Without a step they were dropped
-- before the policy's next one. Every place that drops or releases stored trajectories calls it.
local function retire(P, gid, policy, reason, items, ids, step, batch)
  local task = string.match(gid, '^[^/]+')
  local most = archived(P, task, reason)
  if not most then return forget(P, ids) end
  local held, episodes, bytes = {}, {}, #items
  for _, id in ipairs(ids) do
    local episode = call('HGET', K.owners(P), id)
    if episode then
      held[#held + 1], episodes[#episodes + 1] = id, episode
      bytes = bytes + PACKS.size_of(P, episode, id)
      call('HDEL', K.owners(P), id)
    end
  end
  if #held == 0 then return end
  step = step or tonumber(call('HGET', K.policy(P, policy), 'finished') or 0) + 1
  enter_archive(P, most, bytes, #held, 'gid', gid, 'policy', policy, 'reason', reason, 'step', step, 'batch', batch or '', 'items', items,
    'ids', lines(held), 'episodes', lines(episodes))
end

-- The same for a stored group, which goes, too; returns its trajectories.
local function retire_group(P, gid, reason, step, batch)
  local f = call('HMGET', K.group(P, gid), 'policy', 'items', 'ids')
  local ids = split(f[3])
  retire(P, gid, f[1], reason, f[2], ids, step, batch)
  call('UNLINK', K.group(P, gid))
  return #ids
end

-- The same for one trajectory of an episode that was turned away: of it there is only its header.
local function retire_refused(P, task, policy, reason, header, id, place)
  local most = archived(P, task, reason)
  if not most then return PACKS.forgo(P, place, id) end
  if not PACKS.keep(P, place, id) then return end
  local step = tonumber(call('HGET', K.policy(P, policy), 'finished') or 0) + 1
  enter_archive(P, most, PACKS.size_of(P, place, id) + #header, 1, 'gid', task .. '/' .. policy, 'policy', policy, 'reason', reason, 'step', step,
    'batch', '', 'header', header, 'ids', id, 'episodes', place)
end

-- archive_pack: server, lease ms, least age ms, bytes that are a pack at once, most entries. Returns the entries of the pack that is to be written:
-- the one that was sealed and not written yet, or a new one when there is enough for it or the oldest has waited long enough; nothing while another
-- server writes. A sealed pack never changes, so that writing it again makes the same files.
SIGNATURE.archive_pack = { 'server', 'lease_ms', 'age_ms', 'bytes', 'entries' }
function F.archive_pack(keys, a)
  local P, A, entries, now = keys[1], K.archive(keys[1]), K.archive_entries(keys[1]), now_ms()
  local f = call('HMGET', A, 'writer', 'writer_until', 'sealed', 'bytes')
  if f[1] and f[1] ~= a.server and tonumber(f[2]) > now then return {} end
  local sealed = f[3]
  if not sealed then
    local oldest = call('XRANGE', entries, '-', '+', 'COUNT', a.entries)
    if not oldest[1] then return {} end
    local is_old = tonumber(string.match(oldest[1][1], '^%d+')) + tonumber(a.age_ms) <= now
    if not is_old and #oldest < tonumber(a.entries) and tonumber(f[4]) < tonumber(a.bytes) then return {} end
    local held = 0
    for _, entry in ipairs(oldest) do
      held = held + tonumber(entry[2][2])
      if sealed and held > tonumber(a.bytes) then break end
      sealed = entry[1]
    end
  end
  call('HSET', A, 'writer', a.server, 'writer_until', now + tonumber(a.lease_ms), 'sealed', sealed)
  return call('XRANGE', entries, '-', sealed)
end

-- archive_written: last entry of the pack, bytes written. The pack is in the store: its entries and payloads go. Returns the trajectories, 0 when
-- another server was first.
SIGNATURE.archive_written = { 'sealed', 'bytes' }
function F.archive_written(keys, a)
  local P, A, n = keys[1], K.archive(keys[1]), 0
  if call('HGET', A, 'sealed') ~= a.sealed then return 0 end
  for _, entry in ipairs(call('XRANGE', K.archive_entries(P), '-', a.sealed)) do n = n + leave_archive(P, entry) end
  call('HDEL', A, 'sealed', 'writer', 'problem')
  call('HINCRBY', A, 'written', n)
  call('HINCRBY', A, 'written_bytes', a.bytes)
  return n
end

-- archive_failed: what is wrong with the store, for people. Returns 1.
SIGNATURE.archive_failed = { 'problem' }
function F.archive_failed(keys, a)
  local A = K.archive(keys[1])
  if call('HEXISTS', A, 'problem') == 0 then call('HSET', A, 'problem_ms', now_ms()) end
  call('HSET', A, 'problem', a.problem)
  return 1
end
