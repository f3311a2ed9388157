-- Claiming rows, reading where their payload is, and waiting.

-- Of a claim that may take less: a function's time is everybody's stall.
local MOST_RANGES, MOST_CHUNKS = 128, 64
local AT_ONCE = 32  -- entries of the ready index looked at together, after the first ones

-- The table after time has done its part: leases and groups that are over.
local function open_now(keys)
  local t = open_table(keys)
  if not t or t.now < t.state[DUE] then return t end
  expire(t, 16)
  commit(t)
  return open_table(keys)
end

-- End units with rows that are more than the stage's staleness below the trainer's version.
local function end_stale(t, chunk, i, version)
  local size, least, stale = unit_rows(chunk, t.stages[i]), version - t.stages[i].max_staleness, {}
  local at = t.config.pos[i]
  each_run(chunk, all_rows(chunk), function(sig, made, from, rows)
    if made >= 0 and made < least and string.byte(sig, at) == 114 then
      for u = math.floor(from / size), math.floor((from + rows - 1) / size) do
        stale[u] = math.max(stale[u] or 0, version - made)
      end
    end
  end)
  for u, age in pairs(stale) do
    local reason = age .. ' versions old'
    local final = {state = 'stale', label = 'stale(' .. reason .. ')', reason = reason, step = -1}
    end_rows(t, chunk, {u * size, size}, final, i, 0)
  end
end

-- Ready runs among rows [first, first + count) as {chunk, first, count, delivery, use, ...}, and their number of rows.
local function ready_runs(t, chunk, i, first, count)
  local runs, at = chunk.runs, t.config.pos[i]
  if not runs[4] then
    local class, delivered = string.byte(runs[3], at, at + 1)
    if class ~= 114 then return nil, 0 end
    return {chunk.id, first, count, delivered - FIRST + 1, string.byte(runs[3], 2) - FIRST}, count
  end
  local picks, rows, n = {}, 0, 0
  each_run(chunk, {first, count}, function(sig, _, from, some)
    local class, delivered = string.byte(sig, at, at + 1)
    if class ~= 114 then return end
    picks[n + 1], picks[n + 2], picks[n + 3] = chunk.id, from, some
    picks[n + 4], picks[n + 5] = delivered - FIRST + 1, string.byte(sig, 2) - FIRST
    rows, n = rows + some, n + 5
  end)
  return picks, rows
end

local function append_some(list, more, from, to)
  local shift = #list + 1 - from
  for k = from, to do list[k + shift] = more[k] end
end

-- Add what fits of rows [first, first + count), which begin and end with units of `size`. Returns false when something
-- was left.
local function take(t, chunk, i, first, count, size, want)
  local picks, rows = ready_runs(t, chunk, i, first, count)
  if rows == 0 then return true end
  local all = want.picks
  local fits = rows <= want.room and #all + #picks <= want.most_picks
  if fits and want.tokens then
    local tokens = 0
    for k = 1, #picks, 5 do tokens = tokens + tokens_of(chunk, picks[k + 1], picks[k + 2]) end
    fits = tokens <= want.tokens or (want.got == 0 and count == size)
    if fits then want.tokens = want.tokens - tokens end
  end
  if fits then
    if want.got == 0 then want.picks = picks else append_some(all, picks, 1, #picks) end
    want.room, want.got = want.room - rows, want.got + rows
    return true
  end
  if count == size then
    if want.got == 0 and rows > want.most then want.large = rows end
    return false
  end
  if not want.tokens and size == 1 then
    for k = 1, #picks, 5 do
      if want.room == 0 or #all == want.most_picks then return false end
      picks[k + 2] = math.min(picks[k + 2], want.room)
      append_some(all, picks, k, k + 4)
      want.room, want.got = want.room - picks[k + 2], want.got + picks[k + 2]
    end
    return false
  end
  local units = math.floor(count / size)
  local half = math.max(1, math.floor(units / 2)) * size
  return take(t, chunk, i, first, half, size, want) and take(t, chunk, i, first + half, count - half, size, want)
end

local function collect(t, i, want, version)
  local stage, key, from, chunks = t.stages[i], t.stages[i].key.ready, 0, 0
  local at_once = math.min(AT_ONCE, math.ceil(want.room / t.config.usual_rows))  -- as many as chunks of late let expect
  local stale, last = version and stage.max_staleness, nil
  while true do
    local first_text, last_text = tostring(from), tostring(from + at_once - 1)
    local found = stage.by_unit and redis.call('ZRANGE', key, first_text, last_text, 'WITHSCORES')
      or redis.call('ZRANGE', key, first_text, last_text)
    local step, units = stage.by_unit and 2 or 1, {}
    local ids = found
    if stage.by_unit then
      ids = {}
      for k = 1, #found, 2 do ids[#ids + 1], units[#units + 1] = string.match(found[k], '^(.*)#(%d+)$') end
    end
    local upto = 1
    for k, id in ipairs(ids) do
      if k > upto then  -- as many as the first one lets expect
        upto = k + math.ceil(want.room / math.max(1, want.got / (k - 1 + from))) - 1
        prefetch(t, ids, k, upto)
      end
      local chunk = chunk_of(t, id)
      local size = unit_rows(chunk, stage)
      local first, count = 0, chunk.n
      if stage.by_unit then first, count = units[k] * size, size end
      if stale then end_stale(t, chunk, i, version) end
      if stage.scope == 'chunk' then want.room, want.most = chunk.n, chunk.n end
      local before = want.got
      local whole = take(t, chunk, i, first, count, size, want)
      if stage.by_unit and want.got > before then want.clock = tonumber(found[2 * k]) end
      if id ~= last then chunks, last = chunks + 1, id end
      if not whole or want.room <= 0 or (stage.scope == 'chunk' and want.got > 0) then return end
      if chunks >= MOST_CHUNKS and want.got >= want.least then return end
    end
    if #found < step * at_once then return end
    from, at_once = from + at_once, AT_ONCE
  end
end

-- Where the payload of the wanted units of a chunk is: {id, rows, ms of the put, how rows ended, pieces of each unit...}.
local function whereabouts(chunk, units)
  local pieces = chunk.pieces
  local where = {chunk.id, chunk.n, chunk.at, ends_of(chunk), pieces[units[1]], pieces[units[2]], pieces[units[3]]}
  for k = 4, #units do where[k + 4] = pieces[units[k]] end
  return where
end

-- Name the payload of the claim for the command that comes after this one in its client's hands: SORT of this list gets it without
-- a second round trip. Units in several pieces are left to the client. No state of the table: it goes to no file and no replica.
local function name_payload(t, names)
  redis.set_repl(redis.REPL_NONE)
  redis.call('DEL', t.key.fetch)
  if names[1] and #names <= SOME then redis.call('RPUSH', t.key.fetch, unpack(names)) end
  redis.set_repl(redis.REPL_ALL)
end

local function claim_reply(t, ranges, units)
  local chunks, names, seen, n = {}, {}, {}, 0
  for k = 1, #ranges, 5 do
    local id = ranges[k]
    if not seen[id] then
      seen[id] = true
      local chunk = chunk_of(t, id)
      chunks[#chunks + 1] = whereabouts(chunk, units)
      for u = 1, #units do
        local pieces = chunk.pieces[units[u]]
        local stop = string.find(pieces, ':', 1, true)
        if stop and string.find(pieces, ';', stop, true) == #pieces then
          n = n + 1
          names[n] = id .. slash(units[u]) .. string.sub(pieces, 1, stop - 1)
        end
      end
    end
  end
  name_payload(t, names)
  return {'ok', ranges, chunks}
end

-- The answer of a claim that was repeated because its first answer was lost.
local function told_again(t, held, units)
  local ranges, at = {}, t.config.pos[held.stage]
  each_chunk(t, held.fields, 5, function(chunk, own)
    each_run(chunk, own, function(sig, _, from, rows)
      for _, value in ipairs({chunk.id, from, rows, string.byte(sig, at + 1) - FIRST, string.byte(sig, 2) - FIRST}) do
        ranges[#ranges + 1] = value
      end
    end)
  end)
  return claim_reply(t, ranges, units)
end

-- claim(stage index, slot, serial, worker, most rows, least rows, most tokens, version, waiter, milliseconds left, milliseconds waited,
-- units...): {"ok", {chunk, first, count, delivery, use, ...}, {whereabouts...}}, {"none", ready rows, waiting rows, milliseconds until
-- time may help (-1: never)} or {"large", rows of the first unit}. The client names the lease, so that a repeated call finds its
-- first answer; a waiter that is named is registered when there is nothing.
register('claim', function(keys, args)
  local t = open_now(keys)
  if not t then return {'unknown'} end
  local i, slot, serial, worker, most, least = unpack(args, 1, 6)
  local version, waiter, waited_ms, units = args[8], args[9], args[11], {unpack(args, 12)}
  local stage, held, forgotten = t.stages[i], lease_of(t, slot, serial)
  if held and not held.over then return told_again(t, held, units) end
  if forgotten then  -- its owner ended it, and the server came back older
    local reason = {'dead(lease forgotten)', 'lease forgotten\nby a server that came back older'}
    each_chunk(t, forgotten, 5, function(chunk, ranges) give_back(t, chunk, forgotten[3], ranges, true, reason) end)
    redis.call('HDEL', t.key.leases, slot)
    commit(t)
    t = open_table(keys)
  end
  local want = {picks = {}, got = 0, room = most, most = most, tokens = args[7] ~= '' and args[7]}
  want.least = math.max(least, math.min(stage.min_batch, stage_state(t, i, READY)))
  want.most_picks = 5 * ((want.least > MOST_RANGES or stage.scope == 'batch') and math.max(MOST_RANGES, most) or MOST_RANGES)
  if claimable(t, i, least) then
    want.room = math.min(want.room, allowed_rows(t, i))
    collect(t, i, want, version ~= '' and version)
    if version ~= '' then  -- what was stale is not there any more
      for _, chunk in ipairs(t.order) do tally(t, chunk) end
      if not claimable(t, i, least) then want.got = 0 end
    end
  end
  if want.large then return {'large', want.large} end
  if want.got == 0 or (stage.scope ~= 'chunk' and want.got < least) then
    if waiter ~= '' then
      t.quiet = i  -- it could not take what there is: what changes next may help
      add_waiter(t, waiter, worker, args[10], waited_ms, {i, least, 0})
    end
    if waiter ~= '' or t.order[1] then commit(t) end
    name_payload(t, NONE)
    return {'none', stage_state(t, i, READY), waiting_rows(t, i), next_due(t, i)}
  end
  local due, ranges = t.now + stage.lease_ms, want.picks
  local record, f = {serial, due, i, worker, ranges[1], ranges[2], ranges[3]}, 7
  for k = 6, #ranges, 5 do
    local id, first, count = ranges[k], ranges[k + 1], ranges[k + 2]
    if record[f - 2] == id and record[f - 1] + record[f] == first then
      record[f] = record[f] + count
    else
      record[f + 1], record[f + 2], record[f + 3] = id, first, count
      f = f + 3
    end
  end
  each_chunk(t, record, 5, function(chunk, own) move(t, chunk, own, stage.moves.lease, to_leased, i) end)
  add_to(t, i, TAKEN, want.got)
  if stage.samples_per_insert then t.roomier = true end
  if want.clock then t.state[t.config.base[i] + CLOCK] = math.max(want.clock, stage_state(t, i, CLOCK)) end
  local packed = cmsgpack.pack(record)
  redis.call('HSET', t.key.leases, slot, packed)
  keep(packed, record)
  if due < t.state[DUE] then t.state[DUE] = due end
  if waited_ms > 0 then drop_waiter(t, waiter) end
  local reply = claim_reply(t, ranges, units)
  commit(t)
  return reply
end, 'allow-oom')

-- locate(count of units, units..., chunks...): {"ok", {whereabouts...}}; a freed chunk is {id, 0}.
of_table('locate', function(t, args)
  local split, chunks = 1 + args[1], {}
  local units = {unpack(args, 2, split)}
  prefetch(t, args, split + 1, #args)
  for k = split + 1, #args do
    local chunk = chunk_of(t, args[k])
    chunks[#chunks + 1] = chunk and whereabouts(chunk, units) or {args[k], 0}
  end
  return {'ok', chunks}
end, 'no-writes')

-- wait(waiter, milliseconds left, worker, milliseconds waited, {stage index or 0, rows, settled or bytes}...): registers, or finds
-- the wait fulfilled: {"met"} or {"wait"}, and milliseconds until time may help (-1: never).
register('wait', function(keys, args)
  local t = open_now(keys)
  if not t then return {'unknown'} end
  local interests = {}
  for k = 5, #args do interests[#interests + 1] = args[k] end
  redis.call('DEL', t.prefix .. KEY.wake .. args[1])
  if fulfilled(t, interests) then
    local was = drop_waiter(t, args[1])
    if was == 1 then commit(t) end
    return {'met', -1}
  end
  add_waiter(t, args[1], args[3], args[2], args[4], interests)
  commit(t)
  local due = -1
  for k = 1, #interests, 3 do
    local one = next_due(t, interests[k])
    if one >= 0 and (due < 0 or one < due) then due = one end
  end
  return {'wait', due}
end, 'allow-oom')

-- unwait(waiter, 1 to wake its connection): {"ok", 1 if it was still waiting}.
register('unwait', function(keys, args)
  local t = open_table(keys)
  if not t then return {'ok', 0} end
  local was = drop_waiter(t, args[1])
  if was == 1 then commit(t) end
  if args[2] == 1 then
    redis.call('RPUSH', keys[1] .. KEY.wake .. args[1], '0')
    redis.call('PEXPIRE', keys[1] .. KEY.wake .. args[1], WAKE_TTL_MS)
  else
    redis.call('DEL', keys[1] .. KEY.wake .. args[1])
  end
  return {'ok', was}
end, 'allow-oom')

-- waiting(): {"ok", {waiter, worker, milliseconds waited, milliseconds left, interests...}...}.
of_table('waiting', function(t, args)
  local all, reply = redis.call('HGETALL', t.prefix .. KEY.waiters), {}
  for k = 1, #all, 2 do
    local record = cmsgpack.unpack(all[k + 1])
    local line = {all[k], record[2], t.now - record[3], record[1] - t.now}
    for f = 4, #record do line[#line + 1] = record[f] end
    if record[1] >= t.now then reply[#reply + 1] = line end
  end
  return {'ok', reply}
end, 'no-writes')

-- counts(): {"ok", state, ended as a flat field, value list}.
register('counts', function(keys)
  if not open_table(keys) then return {'unknown'} end
  return {'ok', redis.call('GET', keys[1] .. KEY.state), redis.call('HGETALL', keys[1] .. KEY.ended)}
end, 'no-writes')
