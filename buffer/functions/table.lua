-- A table's records. KEYS[1] of every function is the table's prefix P; all keys share its hash tag.
--
--   P state       hash: version (of the configuration), schema, shape (fingerprints), live, admitted, bytes,
--                 chunks (last ordinal), durable (first step not covered by a checkpoint), redelivered, and per stage index i the rows that are
--                 waiting w<i>, ready r<i>, leased l<i>, done a<i>
--   P config      hash: version -> configuration (msgpack; see buffer/layout.py)
--   P ended       hash: end state, or "state(reason)" -> rows since the run began
--   P marks       hash: producer -> last sequence put
--   P logged      hash: chunk -> rows of batch-log entries whose chunk was not put yet (the server came back older)
--   P applied     hash: client -> serial number of its last operation that ended a lease
--   P chunk:<id>  hash, one per put:
--                   n rows, g group size, o ordinal of admission, b payload bytes
--                   u<j>     vector: 1 when the row has all columns of unit j;  c<j>_<k>: its k-th column, if written alone
--                   s<i>     vector per stage: w waiting, r ready, l leased, a done, s skipped (the row ended elsewhere)
--                   d<i>     vector per stage: deliveries so far, as '0' + n
--                   e        vector: o live, t trained, T trained and durable, d done, f filtered, s stale, x dead
--                   p<j>     payload pieces of unit j, later ones win: "name:first:count:columns:bytes;"
--                   why      how rows ended: first US count US state US step US reason RS
--   P payload:<name>  string: one Arrow record batch without its schema; set by clients, unlinked here
--   P ready:<i>   sorted set: ordinal -> chunk with ready rows of the stage
--   P leases      hash: lease -> msgpack {stage index, worker, {chunk, first, count, ...}}
--   P deadlines   sorted set: milliseconds of the server's clock -> lease
--   P trained     sorted set: step -> "chunk:first:count" not yet covered by a checkpoint
--   P waiters     hash: waiter -> msgpack {until_ms, worker, since_ms, {stage index or 0, rows, settled, ...}}
--   P wake:<waiter>   list: one token wakes the waiter
--
-- Nothing is rolled back: every function checks all that can fail before its first write.

local US, RS = '\31', '\30'
local FIRST_DELIVERY = 48   -- '0': deliveries are digits and the letters after them
local MOST_DELIVERIES = 40
local SOME = 500            -- arguments per command: far below the limit of unpack

local configs, configs_known = {}, 0

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The table of this call, or nil when the server does not know it.
local function open_table(keys)
  local prefix = keys[1]
  local version = redis.call('HGET', prefix .. KEY.state, 'version')
  if not version then return nil end
  local config = configs[prefix]
  if not config or config.version ~= version then
    config = cmsgpack.unpack(redis.call('HGET', prefix .. KEY.config, version))
    config.version = version
    if configs_known > 1000 then configs, configs_known = {}, 0 end
    configs[prefix], configs_known = config, configs_known + 1
  end
  return {prefix = prefix, config = config, stages = config.stages, chunks = {}, order = {}, delta = {}, ended = {}}
end

local function state(t, field)
  return tonumber(redis.call('HGET', t.prefix .. KEY.state, field) or 0)
end

local function bump(t, field, by)
  t.delta[field] = (t.delta[field] or 0) + by
end

local function add_chunk(t, chunk)
  t.chunks[chunk.id] = chunk
  t.order[#t.order + 1] = chunk
  return chunk
end

-- The chunk, read once per call; nil when it was freed.
local function chunk_of(t, id)
  local known = t.chunks[id]
  if known then return known end
  local flat = redis.call('HGETALL', t.prefix .. KEY.chunk .. id)
  if #flat == 0 then return nil end
  local fields = {}
  for k = 1, #flat, 2 do fields[flat[k]] = flat[k + 1] end
  return add_chunk(t, {id = id, n = tonumber(fields.n), group = tonumber(fields.g), fields = fields, before = {}})
end

local function set_field(chunk, name, value)
  if chunk.before[name] == nil then chunk.before[name] = chunk.fields[name] or false end
  chunk.fields[name] = value
end

local function unlink(t, names)
  for from = 1, #names, SOME do
    local keys = {}
    for k = from, math.min(from + SOME - 1, #names) do keys[#keys + 1] = t.prefix .. KEY.payload .. names[k] end
    redis.call('UNLINK', unpack(keys))
  end
end

local function piece_names(chunk, units)
  local names = {}
  for j = 1, units do
    for name in string.gmatch(chunk.fields['p' .. j] or '', '([^:;]+):[^;]*;') do names[#names + 1] = name end
  end
  return names
end

-- A chunk is freed when every row ended, is durable if trained, and was seen by the stages that want ended rows.
local function free_if_over(t, chunk)
  if string.find(vector(chunk, 'e'), '[ot]') then return false end
  for i, stage in ipairs(t.stages) do
    if stage.ended and string.find(vector(chunk, 's' .. i), '[^a]') then return false end
  end
  unlink(t, piece_names(chunk, t.config.units))
  for i = 1, #t.stages do redis.call('ZREM', t.prefix .. KEY.ready .. i, chunk.id) end
  redis.call('DEL', t.prefix .. KEY.chunk .. chunk.id)
  bump(t, 'bytes', -tonumber(chunk.fields.b))
  return true
end

local function save_chunk(t, chunk)
  local args = {}
  for name in pairs(chunk.before) do
    args[#args + 1] = name
    args[#args + 1] = chunk.fields[name]
  end
  for from = 1, #args, SOME do
    redis.call('HSET', t.prefix .. KEY.chunk .. chunk.id, unpack(args, from, math.min(from + SOME - 1, #args)))
  end
  for i = 1, #t.stages do
    local before = chunk.before['s' .. i]
    if before ~= nil then
      local had = before and string.find(before, 'r', 1, true)
      local has = string.find(chunk.fields['s' .. i], 'r', 1, true)
      if has and not had then
        redis.call('ZADD', t.prefix .. KEY.ready .. i, chunk.fields.o, chunk.id)
      elseif had and not has then
        redis.call('ZREM', t.prefix .. KEY.ready .. i, chunk.id)
      end
    end
  end
end
