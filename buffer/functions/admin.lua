-- What operators look at and do: priorities, dead letters, leases, and the figures that `verify` compares.

-- prioritize(stage index, {chunk, first, count, rate}...): {"ok"} or {"units", chunk} when a range is not whole units.
of_table('prioritize', function(t, args)
  local i = args[1]
  for k = 2, #args, 4 do
    local chunk = chunk_of(t, args[k])
    if chunk then
      local size = unit_rows(chunk, t.stages[i])
      local first, count = args[k + 1], args[k + 2]
      if first % size > 0 or count % size > 0 or first + count > chunk.n then return {'units', args[k]} end
    end
  end
  local clock = stage_state(t, i, CLOCK)
  for k = 2, #args, 4 do
    local chunk = chunk_of(t, args[k])
    if chunk then
      local size = unit_rows(chunk, t.stages[i])
      local first, count = args[k + 1], args[k + 2]
      local ready = ready_units(t, chunk, chunk.runs, i)
      for u = first / size, (first + count) / size - 1 do
        local member, rates = chunk.id .. '#' .. u, t.prefix .. KEY.priority .. i
        if ready[u] then  -- what is left of its time passes faster or slower
          local old = tonumber(redis.call('HGET', rates, member) or 1)
          local left = tonumber(redis.call('ZSCORE', t.prefix .. KEY.ready .. i, member)) - clock
          zadd(t, t.prefix .. KEY.ready .. i, string.format('%.17g', clock + left * old / tonumber(args[k + 3])), member)
        end
        redis.call('HSET', rates, member, args[k + 3])
      end
    end
  end
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- dead_letters(): {"ok", {member, ms, how rows of its chunk ended}...}.
of_table('dead_letters', function(t, args)
  local all, reply = redis.call('ZRANGE', t.prefix .. KEY.dead, 0, -1, 'WITHSCORES'), {}
  for k = 1, #all, 2 do
    local chunk = chunk_of(t, string.match(all[k], '^(.*):%d+:%d+:%d+$'))
    reply[#reply + 1] = {all[k], tonumber(all[k + 1]), chunk and ends_of(chunk) or ''}
  end
  return {'ok', reply}
end, 'no-writes')

-- Is a row of this range leased?
local function leased(t, id, first, count)
  local all = redis.call('HGETALL', t.prefix .. KEY.leases)
  for k = 2, #all, 2 do
    local f = cmsgpack.unpack(all[k])
    for r = 5, #f, 3 do
      if f[2] > 0 and f[r] == id and f[r + 1] < first + count and first < f[r + 1] + f[r + 2] then return f[4] end
    end
  end
end

-- bury(member, 1 to retry or 0 to drop, label): {"ok", rows}, {"leased", worker} or {"full", live rows}.
of_table('bury', function(t, args)
  local id, first, count = string.match(args[1], '^(.*):(%d+):(%d+):%d+$')
  local chunk = chunk_of(t, id)
  if redis.call('ZSCORE', t.prefix .. KEY.dead, args[1]) == false or not chunk then return {'ok', 0} end
  first, count = tonumber(first), tonumber(count)
  if args[2] == 1 then
    local worker = leased(t, id, first, count)
    if worker then return {'leased', worker} end
    if live_rows(t) + count > t.config.capacity_rows then return {'full', live_rows(t)} end
  end
  redis.call('ZREM', t.prefix .. KEY.dead, args[1])
  local rows
  if args[2] == 1 then
    rows = move(t, chunk, {first, count}, 'retry', to_retried)
    t.ended = {[args[3]] = -rows}
    add_end(chunk, first, count, '', -1, '')
    join(t, chunk)
  else
    rows = move(t, chunk, {first, count}, 'drop', to_dropped)
  end
  t.state[DEAD] = t.state[DEAD] - rows
  commit(t)
  return {'ok', rows}
end, 'allow-oom')

-- leases(): {"ok", {lease, stage index, worker, rows, milliseconds left, ranges...}...}.
of_table('leases', function(t, args)
  local all, reply = redis.call('HGETALL', t.prefix .. KEY.leases), {}
  for k = 1, #all, 2 do
    local f = cmsgpack.unpack(all[k + 1])
    if f[2] > 0 then
      local line = {all[k] .. '.' .. f[1], f[3], f[4], 0, f[2] - t.now}
      for r = 5, #f, 3 do
        line[4] = line[4] + f[r + 2]
        line[#line + 1], line[#line + 2], line[#line + 3] = f[r], f[r + 1], f[r + 2]
      end
      reply[#reply + 1] = line
    end
  end
  return {'ok', reply}
end, 'no-writes')

-- chunks(chunk...): what `verify` looks at: {"ok", commits, {id, bytes, ordinal, pieces of all units as names:bytes, runs..., indexes}...}.
of_table('chunks', function(t, args)
  local reply = {}
  for _, id in ipairs(args) do
    local chunk = chunk_of(t, id)
    if chunk then
      local indexed, runs, pieces = {}, {}, {}
      for i, stage in ipairs(t.stages) do
        local key = t.prefix .. KEY.ready .. i
        if stage.by_unit then
          local size = unit_rows(chunk, stage)
          local units = {}
          for u = 0, chunk.n / size - 1 do
            if redis.call('ZSCORE', key, id .. '#' .. u) then units[#units + 1] = u end
          end
          indexed[i] = table.concat(units, ',')
        else
          indexed[i] = redis.call('ZSCORE', key, id) and 'yes' or ''
        end
      end
      for k = 1, #chunk.runs, 3 do
        runs[#runs + 1], runs[#runs + 2] = chunk.runs[k], chunk.runs[k + 2]
      end
      for j, entries in ipairs(chunk.pieces) do
        for name, size in string.gmatch(entries, '([^:;]+):%d+:%d+:(%d+)[^;]*;') do
          pieces[#pieces + 1], pieces[#pieces + 2] = j .. '.' .. name, tonumber(size)
        end
      end
      reply[#reply + 1] = {id, chunk.n, chunk.group, chunk.bytes, pieces, runs, indexed}
    end
  end
  return {'ok', t.state[COMMITS], reply}
end, 'no-writes')
