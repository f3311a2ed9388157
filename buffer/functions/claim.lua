-- Claiming rows, reading where their payload is, and waiting.

local MOST_RANGES = 1000  -- a claim's ranges: a function's time is everybody's stall

-- Ready runs of one chunk, at most `room` rows, never part of a unit; returns rows taken, and whether that is all.
local function take_runs(chunk, i, size, room, picks)
  local taken, whole, own = 0, true, {}
  each_run(chunk, {'s' .. i, 'd' .. i}, 0, chunk.n, function(from, rows, chars)
    if not whole or chars[1] ~= 'r' then return end
    local fit = math.min(rows, room - taken)
    if fit > 0 then
      own[#own + 1] = {chunk, from, fit, string.byte(chars[2]) - FIRST_DELIVERY + 1}
      taken = taken + fit
    end
    if fit < rows then
      whole = false
      local cut = math.floor((from + fit) / size) * size
      while #own > 0 and own[#own][2] + own[#own][3] > cut do
        local last = own[#own]
        local keep = math.max(0, cut - last[2])
        taken = taken - (last[3] - keep)
        last[3] = keep
        if keep == 0 then own[#own] = nil end
      end
    end
  end)
  for _, pick in ipairs(own) do picks[#picks + 1] = pick end
  return taken, whole
end

local function collect(t, i, most, least)
  local stage, picks, got = t.stages[i], {}, 0
  local most_ranges = stage.scope == 'batch' and most or math.max(MOST_RANGES, least)
  local chunks = stage.scope == 'chunk' and 1 or math.min(most, most_ranges)
  local ids = redis.call('ZRANGE', t.prefix .. KEY.ready .. i, 0, chunks - 1)
  for _, id in ipairs(ids) do
    local chunk = chunk_of(t, id)
    local size = stage.scope == 'group' and chunk.group or 1
    local room = stage.scope == 'chunk' and chunk.n or most - got
    local taken, whole = take_runs(chunk, i, size, room, picks)
    got = got + taken
    if got == 0 and not whole then return picks, 0, size end
    if not whole or got >= most or #picks >= most_ranges then break end
  end
  return picks, got, 0
end

-- Pieces of the wanted units of a chunk, and how its rows ended: {id, rows, why, pieces of each unit...}.
local function whereabouts(chunk, units)
  local where = {chunk.id, chunk.n, chunk.fields.why or ''}
  for _, unit in ipairs(units) do where[#where + 1] = chunk.fields['p' .. unit] or '' end
  return where
end

local function claim_reply(t, lease, ranges, units)
  local chunks, seen = {}, {}
  for k = 1, #ranges, 4 do
    local chunk = chunk_of(t, ranges[k])
    if chunk and not seen[chunk.id] then
      seen[chunk.id] = true
      chunks[#chunks + 1] = whereabouts(chunk, units)
    end
  end
  return {'ok', lease, ranges, chunks}
end

-- claim(stage index, lease, worker, most rows, least rows, units...): {"ok", lease, {chunk, first, count, delivery, ...},
-- {whereabouts...}}, {"none", ready rows}, or {"large", group size}. The client names the lease, so that a repeated call
-- finds its first answer.
register('claim', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local i, lease = tonumber(args[1]), args[2]
  local stage, units = t.stages[i], {}
  for k = 6, #args do units[#units + 1] = args[k] end
  local held = lease_of(t, lease)
  if held then
    local ranges = {}
    each_range(t, held.ranges, function(chunk, first, count)
      each_run(chunk, {'d' .. i}, first, count, function(from, rows, chars)
        for _, value in ipairs({chunk.id, from, rows, string.byte(chars[1]) - FIRST_DELIVERY}) do
          ranges[#ranges + 1] = value
        end
      end)
    end)
    return claim_reply(t, lease, ranges, units)
  end
  if expire_due(t, 16) > 0 then
    commit(t)
    t = open_table(keys)
  end
  local least, ready = tonumber(args[5]), state(t, 'r' .. i)
  if ready < least or ready == 0 then return {'none', ready} end
  local picks, got, large = collect(t, i, tonumber(args[4]), least)
  if large > 0 then return {'large', large} end
  if got == 0 or (stage.scope ~= 'chunk' and got < least) then return {'none', ready} end
  local ranges, record = {}, {}
  for _, pick in ipairs(picks) do
    local chunk, first, count = pick[1], pick[2], pick[3]
    local delivery = math.min(pick[4], MOST_DELIVERIES)
    set_rows(chunk, 's' .. i, first, count, 'l')
    set_rows(chunk, 'd' .. i, first, count, string.char(FIRST_DELIVERY + delivery))
    for _, value in ipairs({chunk.id, first, count, delivery}) do ranges[#ranges + 1] = value end
    for _, value in ipairs({chunk.id, first, count}) do record[#record + 1] = value end
  end
  bump(t, 'r' .. i, -got)
  bump(t, 'l' .. i, got)
  redis.call('HSET', t.prefix .. KEY.leases, lease, cmsgpack.pack({i, args[3], record}))
  redis.call('ZADD', t.prefix .. KEY.deadlines, now_ms() + stage.lease_ms, lease)
  local reply = claim_reply(t, lease, ranges, units)
  commit(t)
  return reply
end, 'allow-oom')

-- locate(count of units, units..., chunks...): {"ok", {whereabouts...}}; a freed chunk is {id, 0}.
register('locate', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local units, chunks = {}, {}
  local split = 1 + tonumber(args[1])
  for k = 2, split do units[#units + 1] = args[k] end
  for k = split + 1, #args do
    local chunk = chunk_of(t, args[k])
    chunks[#chunks + 1] = chunk and whereabouts(chunk, units) or {args[k], 0}
  end
  return {'ok', chunks}
end, 'no-writes')

-- wait(waiter, milliseconds left, worker, milliseconds waited, {stage index or 0, rows, settled}...): registers, or finds
-- the wait fulfilled: {"met"} or {"wait"}, and milliseconds until the next lease expires (-1: none).
register('wait', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  if expire_due(t, 16) > 0 then
    commit(t)
    t = open_table(keys)
  end
  local interests = {}
  for k = 5, #args do interests[#interests + 1] = tonumber(args[k]) end
  redis.call('DEL', t.prefix .. KEY.wake .. args[1])
  if fulfilled(t, interests) then
    redis.call('HDEL', t.prefix .. KEY.waiters, args[1])
    return {'met', -1}
  end
  local now = now_ms()
  local record = {now + tonumber(args[2]), args[3], now - tonumber(args[4]), interests}
  redis.call('HSET', t.prefix .. KEY.waiters, args[1], cmsgpack.pack(record))
  local first = redis.call('ZRANGE', t.prefix .. KEY.deadlines, 0, 0, 'WITHSCORES')
  return {'wait', first[2] and math.max(0, tonumber(first[2]) - now) or -1}
end, 'allow-oom')

-- unwait(waiter, 1 to wake its connection): {"ok", 1 if it was still waiting}.
register('unwait', function(keys, args)
  local was = redis.call('HDEL', keys[1] .. KEY.waiters, args[1])
  if args[2] == '1' then
    redis.call('RPUSH', keys[1] .. KEY.wake .. args[1], '0')
    redis.call('PEXPIRE', keys[1] .. KEY.wake .. args[1], WAKE_TTL_MS)
  else
    redis.call('DEL', keys[1] .. KEY.wake .. args[1])
  end
  return {'ok', was}
end, 'allow-oom')

-- waiting(): {"ok", {waiter, worker, milliseconds waited, milliseconds left, interests...}...}.
register('waiting', function(keys)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local all, now, reply = redis.call('HGETALL', t.prefix .. KEY.waiters), now_ms(), {}
  for k = 1, #all, 2 do
    local record = cmsgpack.unpack(all[k + 1])
    local line = {all[k], record[2], now - record[3], record[1] - now}
    for _, value in ipairs(record[4]) do line[#line + 1] = value end
    if record[1] >= now then reply[#reply + 1] = line end
  end
  return {'ok', reply}
end, 'no-writes')

-- counts(): {"ok", state, ended}, both as flat field, value lists.
register('counts', function(keys)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  return {'ok', redis.call('HGETALL', t.prefix .. KEY.state), redis.call('HGETALL', t.prefix .. KEY.ended)}
end, 'no-writes')
